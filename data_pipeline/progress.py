"""How far a long command has come and how fast it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

INTERVAL_SECONDS = 2.0


class Progress:
    """Counts what a build reads and encodes, and reports it every `INTERVAL_SECONDS`."""

    def __init__(self, report: Callable[[str], None], total_bytes: int) -> None:
        self._report = report
        self._total_bytes = max(total_bytes, 1)
        self._file_bytes = self._characters = self._documents = self._tokens = 0
        self._began = self._reported = time.monotonic()

    def read(self, text: str) -> None:
        """A document was read."""
        self._documents += 1
        self._characters += len(text)

    def finish_file(self, size: int) -> None:
        """An input file of so many bytes was read to its end."""
        self._file_bytes += size

    def add(self, tokens: int) -> None:
        """A document was encoded."""
        self._tokens += tokens
        now = time.monotonic()
        if now - self._reported >= INTERVAL_SECONDS:
            self._reported = now
            self._report(self.line(now - self._began))

    def line(self, seconds: float) -> str:
        """All counts as text."""
        share = self._file_bytes / self._total_bytes
        left = f", about {seconds / share - seconds:.0f} s left" if share > 0.02 else ""
        rate = self._characters / 1e6 / max(seconds, 1e-9)
        return (
            f"{self._documents:,} documents, {self._tokens / 1e6:.1f}M tokens, "
            f"{self._characters / 1e6:.0f}M characters ({rate:.1f}M/s), {share:.0%} of the files{left}"
        )


class StatusLine:
    """Progress on stderr: one line that is overwritten on a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._width = 0
        self._shown = 0.0

    def show(self, text: str) -> None:
        """Show `text` in place of what was shown before."""
        if self._is_terminal:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)
        elif time.monotonic() - self._shown >= INTERVAL_SECONDS:
            print(text, file=sys.stderr, flush=True)
            self._shown = time.monotonic()

    def end(self) -> None:
        """Leave the last text where it is."""
        if self._is_terminal and self._width:
            print(file=sys.stderr)
