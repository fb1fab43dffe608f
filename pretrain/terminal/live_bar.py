"""The progress bar of a training run: its latest measurements stay at the terminal's bottom line.

All other lines scroll by above it. Where the output is not a terminal, nothing changes: a log file
has plain lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_CLEAR = "\r\x1b[2K"
_BAR_WIDTH = 24
_NARROW_BAR_WIDTH = 4  # leaves room for loss, speed and time left in 80 columns
_WIDE_TERMINAL = 120


@contextlib.contextmanager
def live_bar() -> Iterator[None]:
    """Write stderr, and stdout if it is a terminal, around a bar, in the block.

    Only if stderr, where log lines go, is a terminal that can redraw a line.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    sys.stdout.flush()
    output = LiveOutput(sys.stderr.fileno())
    with contextlib.ExitStack() as stack:
        stack.callback(output.leave)
        stack.enter_context(contextlib.redirect_stderr(output))
        if sys.stdout.isatty():
            stack.enter_context(contextlib.redirect_stdout(output))
        yield


@dataclass(frozen=True)
class LogLine:
    """A logged line; `message` is what comes after level, time and writer."""

    text: str
    message: str = ""
    progress: float | None = None  # of a line of measurements: which share of the run is done


def show(line: LogLine) -> None:
    """Write the line to stderr, from any thread; measurements become the bar where there is one."""
    if isinstance(sys.stderr, LiveOutput):
        sys.stderr.show(line)
    else:
        sys.stderr.write(f"{line.text}\n")
        sys.stderr.flush()


class LiveOutput(io.TextIOBase):
    """A stream on which each metrics line replaces the one before; other lines stay above it."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal  # file descriptor
        self._lock = threading.RLock()  # a signal handler may write in the middle of a write
        self._unfinished = ""  # a line whose end has not come yet
        self._bar: LogLine | None = None

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._unfinished = (self._unfinished + text).split("\n")
            self._draw("".join(f"{_CLEAR}{line}\n" for line in lines))
        return len(text)

    def show(self, line: LogLine) -> None:
        """Write a line, or let it become the bar."""
        with self._lock:
            if line.progress is None:
                self._draw(f"{_CLEAR}{line.text}\n")
            else:
                self._bar = line
                self._draw("")

    def leave(self) -> None:
        """Let the last measurements remain; what others write starts on the next line."""
        with self._lock:
            if self._unfinished or self._bar:
                os.write(self._terminal, b"\n")
            self._unfinished, self._bar = "", None

    def _draw(self, above: str) -> None:
        bottom = self._unfinished or self._fitted_bar()
        os.write(self._terminal, f"{above}{_CLEAR}{bottom}".encode())

    def _fitted_bar(self) -> str:
        if self._bar is None or self._bar.progress is None:
            return ""
        columns = shutil.get_terminal_size().columns
        width = _BAR_WIDTH if columns >= _WIDE_TERMINAL else _NARROW_BAR_WIDTH
        return f"{_drawn(self._bar.progress, width)}  {self._bar.message}"[: columns - 1]


def _drawn(fraction: float, width: int) -> str:
    done = round(min(1.0, fraction) * width)
    return f"[{'#' * done}{'-' * (width - done)}] {fraction:4.0%}"
