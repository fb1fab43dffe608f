"""A training run on a terminal: its newest measurements as a bar that stays at the bottom, everything else above it.

Where the output is no terminal nothing changes: a log has plain lines.
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

_MEASUREMENTS = re.compile(
    r"step +(\d+)/(\d+)  "
)  # what pretrain.terminal.train_lines.train_line begins with
_CLEAR = "\r\x1b[2K"
_BAR_WIDTH = 24


@contextlib.contextmanager
def live_bar() -> Iterator[None]:
    """In the block, stdout and stderr are written around a bar, if stdout is a terminal that can redraw a line."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    sys.stdout.flush()
    output = LiveOutput(sys.stdout.fileno())
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            yield
        finally:
            output.leave()


def echo(line: bytes) -> None:
    """Show a line of another process here, from any thread; past the buffer, which may be gone at the end."""
    if isinstance(sys.stdout, LiveOutput):
        sys.stdout.write(line.decode(errors="replace"))
    else:
        os.write(1, line)


class LiveOutput(io.TextIOBase):
    """A stream on which each line of measurements replaces the one before; all other lines stay, above it."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal  # file descriptor
        self._lock = threading.RLock()  # a signal handler may print in the middle of a print
        self._begun = ""  # of a line whose end has not come
        self._bar = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            above = "".join(map(self._taken, lines))
            os.write(self._terminal, f"{above}{_CLEAR}{self._begun or self._fitted_bar()}".encode())
        return len(text)

    def leave(self) -> None:
        """Let the last measurements stay where they are, for others to write below them."""
        with self._lock:
            if self._begun or self._bar:
                os.write(self._terminal, b"\n")
            self._begun = self._bar = ""

    def _taken(self, line: str) -> str:
        """What to write for a complete line: nothing, where it becomes the bar."""
        if found := _MEASUREMENTS.match(line):
            self._bar = f"{_drawn(int(found[1]) / max(1, int(found[2])))}  {line}"
            return ""
        return f"{_CLEAR}{line}\n"

    def _fitted_bar(self) -> str:
        return self._bar[: shutil.get_terminal_size().columns - 1]


def _drawn(share: float) -> str:
    done = round(min(1.0, share) * _BAR_WIDTH)
    return f"[{'#' * done}{'-' * (_BAR_WIDTH - done)}] {share:4.0%}"
