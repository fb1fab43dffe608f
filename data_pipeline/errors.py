"""The errors a user can cause, and how a command reports them: one line, exit status 2, no traceback."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
WRONG_PLACE = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EXDEV,
)
NO_ROOM = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # disk full, quota used up, file larger than allowed


class UserError(Exception):
    """Something outside the code is wrong; the message says what was found, what was expected, what to do."""


class ConfigError(UserError):
    """A setting is missing, unknown, or contradicts another one."""


class DataError(UserError):
    """A corpus, shard, manifest or tokenizer is missing, damaged or does not fit the run."""


class CheckpointError(UserError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""


class TrainingError(UserError):
    """A run does not learn and cannot heal itself."""


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)


def exit_status_of(command: Callable[[], int], report: Callable[[str], None] = _print_error) -> int:
    """Run a command; the exit status, also for what it raises.

    An error that a user can cause is reported as one line, by default on stderr.
    """
    try:
        return command()
    except UserError as error:
        report(str(error))
    except BrokenPipeError:
        # The reader of our output went away (`... | head`); there is nobody left to tell.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (*NO_ROOM, *WRONG_PLACE):
            raise
        report(f"{error.filename or 'a file'}: {error.strerror}; {_advice(error.errno)}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR


def _advice(number: int) -> str:
    if number in NO_ROOM:
        return "free some space and run the same command again: finished work is kept"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "give this user the right to it, or choose another place"
    return "check the path"
