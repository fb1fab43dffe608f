"""Ctrl-C in the first moments of a program, while it imports its own modules.

Imports next to nothing itself: what is imported before the block starts is not covered.
"""

import sys

EXIT_INTERRUPTED = 130
ONE_PRESS_SECONDS = 0.5  # two SIGINTs within it are one Ctrl-C, sent to a group and passed on


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
