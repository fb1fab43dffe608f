"""The progress bar of a training run: its latest measurements stay at the terminal's bottom line.

All other lines scroll by above it. Where the output is not a terminal, nothing changes: a log file
has plain lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator

from pretrain.terminal.log import LINE_START

_MEASUREMENTS = re.compile(r"step +(\d+)/(\d+)  ")  # the start of `train_lines.train_line`
_CLEAR = "\r\x1b[2K"
_BAR_WIDTH = 24


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


def echo(line: bytes) -> None:
    """Show a log line of another process here, from any thread.

    It bypasses Python's buffer, which may be gone while the interpreter exits.
    """
    if isinstance(sys.stderr, LiveOutput):
        sys.stderr.write(line.decode(errors="replace"))
    else:
        os.write(2, line)


class LiveOutput(io.TextIOBase):
    """A stream on which each metrics line replaces the one before; other lines stay above it."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal  # file descriptor
        self._lock = threading.RLock()  # a signal handler may write in the middle of a write
        self._unfinished = ""  # a line whose end has not come yet
        self._bar = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._unfinished = (self._unfinished + text).split("\n")
            above = "".join(map(self._taken, lines))
            bottom = self._unfinished or self._fitted_bar()
            os.write(self._terminal, f"{above}{_CLEAR}{bottom}".encode())
        return len(text)

    def leave(self) -> None:
        """Let the last measurements remain; what others write starts on the next line."""
        with self._lock:
            if self._unfinished or self._bar:
                os.write(self._terminal, b"\n")
            self._unfinished = self._bar = ""

    def _taken(self, line: str) -> str:
        """What to write for a complete line: nothing if it becomes the bar."""
        message = LINE_START.sub("", line)
        if found := _MEASUREMENTS.match(message):
            self._bar = f"{_drawn(int(found[1]) / max(1, int(found[2])))}  {message}"
            return ""
        return f"{_CLEAR}{line}\n"

    def _fitted_bar(self) -> str:
        return self._bar[: shutil.get_terminal_size().columns - 1]


def _drawn(fraction: float) -> str:
    done = round(min(1.0, fraction) * _BAR_WIDTH)
    return f"[{'#' * done}{'-' * (_BAR_WIDTH - done)}] {fraction:4.0%}"
