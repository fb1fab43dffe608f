"""How far a long command has come and how fast it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

INTERVAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """How much of its input a build has read and encoded after some seconds; as text, with its rate and time left."""

    total_bytes: int
    file_bytes: int = 0
    documents: int = 0
    characters: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        share = self.file_bytes / max(self.total_bytes, 1)
        left = f", about {duration(self.seconds / share - self.seconds)} left" if 0.02 < share < 1 else ""
        rate = self.characters / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{self.documents:,} documents, {self.tokens / 1e6:.1f}M tokens, "
            f"{self.characters / 1e6:.0f}M characters ({rate:.1f}M/s), {share:.0%} of the files{left}"
        )


# What a long command tells while it works; each thing replaces the one before.
Report = Callable[[str | Reading], None]


def joined(readings: Iterable[Reading], seconds: float) -> Reading:
    """What several processes have done together in `seconds`."""
    rows = [(each.total_bytes, each.file_bytes, each.documents, each.characters, each.tokens) for each in readings]
    return Reading(*(sum(column) for column in zip(*rows, strict=True)), seconds=seconds)


def duration(seconds: float) -> str:
    """Seconds as people say them: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Progress:
    """Counts what a build reads and encodes, and reports it every `INTERVAL_SECONDS` and at the end."""

    def __init__(self, report: Report, total_bytes: int) -> None:
        self._report = report
        self._total_bytes = total_bytes
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
        if time.monotonic() - self._reported >= INTERVAL_SECONDS:
            self.show()

    def show(self) -> None:
        """Report now."""
        self._reported = time.monotonic()
        seconds = self._reported - self._began
        counts = (self._file_bytes, self._documents, self._characters, self._tokens)
        self._report(Reading(self._total_bytes, *counts, seconds))


class StatusLine:
    """Progress on stderr: one line that is overwritten on a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._width = 0
        self._shown = 0.0

    def show(self, what: str | Reading) -> None:
        """Show this in place of what was shown before."""
        text = str(what)
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
