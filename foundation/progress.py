"""Progress of long commands: notes, durations, and a status line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL_SECONDS = 2.0
# Largest first: a unit, its length in seconds, and the shortest duration in seconds shown in it.
DURATION_UNITS = (("days", 86400, 172_800), ("h", 3600, 6000), ("min", 60, 100))


@dataclass(frozen=True)
class Note:
    """A line that the user should see: it is not replaced by later progress."""

    text: str


# Receives the progress of a command; each value but a Note replaces the previous one.
Report = Callable[[object], None]


def duration(seconds: float) -> str:
    """Return a duration in one unit with two digits or more: 0.25 s, 2.9 min, 12 h, 3.5 days."""
    for unit, size, least in DURATION_UNITS:
        if seconds >= least:
            amount = seconds / size
            return f"{amount:.1f} {unit}" if amount < 9.95 else f"{amount:,.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"


class StatusLine:
    """Progress on stderr: a line that is overwritten on a terminal, else one every 2 seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._width = 0
        self._shown = 0.0
        self._waiting = ""  # without a terminal: the newest text, until it is printed
        self._noted: set[Note] = set()

    def show(self, what: object) -> None:
        """Show a value instead of the last one; a Note stays, and is shown once."""
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
        elif self._waiting:  # the last text has the final counts
            print(self._waiting, file=sys.stderr, flush=True)
            self._waiting = ""
