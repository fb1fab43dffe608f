"""How far a build has come and how fast it goes, as a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_SECONDS = 2.0


class Progress:
    """Counts what is read and encoded; reports at most every `INTERVAL_SECONDS`."""

    def __init__(self, report: Callable[[str], None], total_bytes: int) -> None:
        self._report = report
        self._total_bytes = max(total_bytes, 1)
        self._file_bytes = self._characters = self._documents = self._tokens = 0
        self._began = self._reported = time.monotonic()

    def read(self, text: str) -> None:
        self._documents += 1
        self._characters += len(text)

    def finish_file(self, size: int) -> None:
        self._file_bytes += size

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        now = time.monotonic()
        if now - self._reported >= INTERVAL_SECONDS:
            self._reported = now
            self._report(self.line(now - self._began))

    def line(self, seconds: float) -> str:
        share = self._file_bytes / self._total_bytes
        left = f", about {seconds / share - seconds:.0f} s left" if share > 0.02 else ""
        return (
            f"{self._documents:,} documents, {self._tokens / 1e6:.1f}M tokens, "
            f"{self._characters / 1e6:.0f}M characters at {self._characters / 1e6 / max(seconds, 1e-9):.1f}M/s, files {share:.0%}{left}"
        )
