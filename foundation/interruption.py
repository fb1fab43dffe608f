"""Ctrl-C in the first moments of a program, while it imports its own modules.

This module imports almost nothing: only imports inside the block are covered.
"""

import sys

EXIT_INTERRUPTED = 130
# Two SIGINTs within this time are one Ctrl-C: the terminal's, and the same passed on by a parent.
ONE_PRESS_SECONDS = 0.5


class ExitWhenInterrupted:
    """In the block a Ctrl-C ends the process with one line and status 130, without a traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            say_interrupted()
            sys.exit(EXIT_INTERRUPTED)


def say_interrupted() -> None:
    """Print the line that takes the place of a traceback."""
    print("interrupted", file=sys.stderr)
