"""Errors that a user can cause. A command reports them on one line, with exit status 2."""

from __future__ import annotations

import errno
import sys
import unicodedata
from collections.abc import Callable

from data_pipeline.credentials import redacted

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, or largest file exceeded
NO_PERMISSION = (errno.EROFS, errno.EACCES, errno.EPERM)
WRONG_PATH = (
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EXDEV),
)


class UserError(Exception):
    """Something outside the code is wrong: what was found, what was expected, what to do."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


class ConfigError(UserError):
    """A setting is missing, unknown, or contradicts another one."""


class DataError(UserError):
    """A corpus, shard, manifest or tokenizer is missing, corrupted, or does not fit the run."""


class CheckpointError(UserError):
    """A checkpoint is incomplete, corrupted, or belongs to another run."""


class TrainingError(UserError):
    """A run does not learn and cannot recover automatically."""


def printable(text: str) -> str:
    """The text with escapes for control characters other than line breaks: terminals obey them."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character)[0] != "C"
        else ascii(character)[1:-1]
        for character in text
    )


def _print_error(text: str) -> None:
    print(f"error: {printable(redacted(text))}", file=sys.stderr)


def exit_status_of(command: Callable[[], int], report: Callable[[str], None] = _print_error) -> int:
    """Run a command and return its exit status, also for what it raises.

    An error that a user can cause is reported as one line, by default on stderr.
    """
    try:
        return command()
    except UserError as error:
        report(str(error))
    except BrokenPipeError:
        # The reader of our output exited (`... | head`). Closing stderr keeps Python from
        # reporting the failed flush of stdout at exit.
        sys.stderr.close()
        return 0
    except OSError as error:
        if (advice := _advice(error.errno)) is None:
            raise
        report(f"{os_error_text(error)}; {advice}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR


def os_error_text(error: OSError) -> str:
    """Return the file and the reason: `RUN/metrics.jsonl: No space left on device`."""
    return f"{error.filename or 'a file'}: {error.strerror or error}"


def _advice(number: int | None) -> str | None:
    if number in NO_SPACE:
        return "free disk space and run the same command again: finished work is kept"
    if number in NO_PERMISSION:
        return "give this user the permissions, or choose another path"
    return "check the path" if number in WRONG_PATH else None
