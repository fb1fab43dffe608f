"""Progress of long commands: counts, rates, time left, and a status line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

INTERVAL_SECONDS = 2.0
# Largest first: a unit, its seconds, and the seconds from which it is used.
DURATION_UNITS = (("days", 86400, 172_800), ("h", 3600, 6000), ("min", 60, 100))


@dataclass(slots=True)
class Reading:
    """Counts of a build after some seconds; as text, with its rate and time left."""

    total_bytes: int  # of the files
    skipped_bytes: int = 0  # of them, read again by a resumed build
    file_bytes: int = 0
    documents: int = 0
    characters: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        fraction = self.file_bytes / max(self.total_bytes, 1)
        done, to_do = self.file_bytes - self.skipped_bytes, self.total_bytes - self.file_bytes
        left = ""
        if done > 0.02 * to_do > 0:
            left = f", about {duration(self.seconds * to_do / done)} left"
        rate = self.characters / max(self.seconds, 1e-9)
        documents = f"{self.documents:,} document{'' if self.documents == 1 else 's'}"
        return (
            f"{documents}, {_amount(self.tokens)} tokens, "
            f"{_amount(self.characters)} characters ({_amount(rate)}/s), "
            f"{int(100 * fraction)}% of the files{left}"
        )


def _amount(count: float) -> str:
    """Return 512, 12.3k or 4.0M."""
    if count < 1000:
        return f"{count:.0f}"
    return f"{count / 1e3:.1f}k" if count < 1e6 else f"{count / 1e6:,.1f}M"


@dataclass(frozen=True)
class Note:
    """A line that the user should see: it is not replaced by later progress."""

    text: str


# Receives the progress of a command; each value but a Note replaces the one before.
Report = Callable[[str | Reading | Note], None]


def joined(readings: Iterable[Reading], seconds: float) -> Reading:
    """Return the sums of the readings of several processes, after `seconds`."""
    rows = list(readings)
    names = [field.name for field in fields(Reading) if field.name != "seconds"]
    counts = {name: sum(getattr(row, name) for row in rows) for name in names}
    return Reading(**counts, seconds=seconds)


def duration(seconds: float) -> str:
    """Return a duration in one unit with two digits or more: 0.25 s, 2.9 min, 12 h, 3.5 days."""
    for unit, size, least in DURATION_UNITS:
        if seconds >= least:
            amount = seconds / size
            return f"{amount:.1f} {unit}" if amount < 9.95 else f"{amount:,.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"


class Progress:
    """Counts what a build encodes; reports it every `INTERVAL_SECONDS` and at the end."""

    def __init__(self, report: Report, total_bytes: int) -> None:
        self._report = report
        self._counts = Reading(total_bytes)
        self._finished_bytes = 0  # of the files that were read to their end
        self._tell: Callable[[], int] = lambda: 0  # bytes read of the current file
        self._is_in_file = False
        self._started = self._reported = time.monotonic()

    def follow(self, tell: Callable[[], int]) -> None:
        """Note that a file was opened; `tell` returns how many of its bytes were read."""
        self._tell, self._is_in_file = tell, True

    def finish_file(self, size: int) -> None:
        """Note that a file of `size` bytes was read to its end."""
        self._finished_bytes += size
        self._tell, self._is_in_file = (lambda: 0), False

    def add(self, characters: int, tokens: int) -> None:
        """Count an encoded document."""
        counts = self._counts
        if not counts.documents:
            counts.skipped_bytes = self._finished_bytes + self._tell()
        counts.documents += 1
        counts.characters += characters
        counts.tokens += tokens
        if time.monotonic() - self._reported >= INTERVAL_SECONDS:
            self.show()

    def show(self) -> None:
        """Report now."""
        self._reported = time.monotonic()
        file_bytes = self._finished_bytes + self._tell()
        if self._is_in_file:  # its last bytes are read ahead of the documents in them
            file_bytes = min(file_bytes, self._counts.total_bytes - 1)
        seconds = self._reported - self._started
        self._report(replace(self._counts, file_bytes=file_bytes, seconds=seconds))


class StatusLine:
    """Progress on stderr: a line that is overwritten on a terminal, else one every 2 seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._width = 0
        self._shown = 0.0
        self._waiting = ""  # of a pipe: the newest text that was not printed
        self._noted: set[Note] = set()

    def show(self, what: str | Reading | Note) -> None:
        """Show this instead of what was shown before; a Note stays, and is shown once."""
        if isinstance(what, Note):
            if what in self._noted:
                return
            self._noted.add(what)
            start = "\r" if self._is_terminal else ""
            print(start + what.text.ljust(self._width), file=sys.stderr, flush=True)
            self._width = 0
            return
        text = str(what)
        if self._is_terminal:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)
        elif time.monotonic() - self._shown >= INTERVAL_SECONDS:
            print(text, file=sys.stderr, flush=True)
            self._shown, self._waiting = time.monotonic(), ""
        else:
            self._waiting = text

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *exception: object) -> None:
        """Keep the last text and start a new line: an error may follow."""
        if self._is_terminal and self._width:
            print(file=sys.stderr)
            self._width = 0
        elif self._waiting:  # the last counts are those of the whole build
            print(self._waiting, file=sys.stderr, flush=True)
            self._waiting = ""
