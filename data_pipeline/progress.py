"""How far a long command has come and how fast it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

INTERVAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a build has come after some seconds; as text, with its rate and time left."""

    total_bytes: int  # of the files
    skipped_bytes: int = 0  # of them, where a build goes on that was killed
    file_bytes: int = 0
    documents: int = 0
    characters: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        share = self.file_bytes / max(self.total_bytes, 1)
        done, to_do = self.file_bytes - self.skipped_bytes, self.total_bytes - self.file_bytes
        left = (
            f", about {duration(self.seconds * to_do / done)} left"
            if done > 0.02 * to_do > 0
            else ""
        )
        rate = self.characters / 1e6 / max(self.seconds, 1e-9)
        return (
            f"{self.documents:,} documents, {self.tokens / 1e6:.1f}M tokens, "
            f"{self.characters / 1e6:.0f}M characters ({rate:.1f}M/s), {share:.0%} of the files{left}"
        )


# What a long command tells while it works; each thing replaces the one before.
Report = Callable[[str | Reading], None]


def joined(readings: Iterable[Reading], seconds: float) -> Reading:
    """What several processes have done together in `seconds`."""
    counts = [field.name for field in fields(Reading) if field.name != "seconds"]
    rows = list(readings)
    return Reading(
        **{name: sum(getattr(row, name) for row in rows) for name in counts}, seconds=seconds
    )


def duration(seconds: float) -> str:
    """Seconds as people say them: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Progress:
    """Counts what a build encodes, and reports it every `INTERVAL_SECONDS` and at the end."""

    def __init__(self, report: Report, total_bytes: int) -> None:
        self._report = report
        self._total_bytes = total_bytes
        self._whole_bytes = 0  # of the files that were read to their end
        self._tell: Callable[[], int] = lambda: 0  # bytes read of the current one
        self._skipped_bytes = 0
        self._characters = self._documents = self._tokens = 0
        self._began = self._reported = time.monotonic()

    def follow(self, tell: Callable[[], int]) -> None:
        """A file was opened; `tell` gives the bytes that have been read of it."""
        self._tell = tell

    def finish_file(self, size: int) -> None:
        """A file of so many bytes was read to its end."""
        self._whole_bytes += size
        self._tell = lambda: 0

    def add(self, characters: int, tokens: int) -> None:
        """A document was encoded."""
        if not self._documents:
            self._skipped_bytes = self._position()
        self._documents += 1
        self._characters += characters
        self._tokens += tokens
        if time.monotonic() - self._reported >= INTERVAL_SECONDS:
            self.show()

    def show(self) -> None:
        """Report now."""
        self._reported = time.monotonic()
        self._report(
            Reading(
                total_bytes=self._total_bytes,
                skipped_bytes=self._skipped_bytes,
                file_bytes=self._position(),
                documents=self._documents,
                characters=self._characters,
                tokens=self._tokens,
                seconds=self._reported - self._began,
            )
        )

    def _position(self) -> int:
        return self._whole_bytes + self._tell()


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
