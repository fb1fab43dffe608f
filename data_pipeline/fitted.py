"""Lines of a command's output, fitted to the terminal: its columns stay readable at 80 of them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator

LEAST_WIDTH = 40


def print_fitted(lines: Iterable[str], indent: int) -> None:
    """Print the lines; on a terminal, what does not fit continues below, indented by `indent`.

    In a pipe a line stays whole, for those who search in it.
    """
    width = terminal_width()
    for line in fitted(lines, indent, width) if width else lines:
        print(line)


def terminal_width() -> int:
    """The columns of the terminal that stdout is; 0 in a pipe, where lines stay whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def fitted(lines: Iterable[str], indent: int, width: int) -> Iterator[str]:
    """Yield the lines, those that are longer than `width` in several."""
    for line in lines:
        if len(line) <= width:
            yield line
            continue
        start, text = line[:indent], line[indent:]
        if start.strip() and not start.endswith(" "):  # no column begins there
            start, text = line[: len(line) - len(line.lstrip())], line
        yield from textwrap.wrap(
            text.strip(),
            max(width, LEAST_WIDTH),
            initial_indent=start,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
