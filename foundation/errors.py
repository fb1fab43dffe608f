"""Errors that a user can cause. A command reports them on one line, with exit status 2."""

import contextlib
import difflib
import errno
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from foundation.credentials import redacted
from foundation.interruption import EXIT_INTERRUPTED, say_interrupted

EXIT_USER_ERROR = 2
EXIT_NODE_UNUSABLE = 77  # a rank's status if it would have started on another node
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, or largest file exceeded
NO_PERMISSION = (errno.EROFS, errno.EACCES, errno.EPERM)
TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
LONGEST_SHOWN = 60  # characters of a value in a message
LONGEST_LIST = 1000  # characters of names in a message
# Unicode categories: control, format (such as text direction), surrogate, unassigned, line ends.
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
# Longer than any path that a person can read: a file's name has at most 255 bytes.
_LONG_WORD = re.compile(r"(\S{300})\S{100,}(\S{100})")
# Errors of a disk or file server that fails or cannot be reached.
STORAGE_FAILS = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO),
    *(errno.ENODEV, errno.ENXIO, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET),
)


class UserError(Exception):
    """Something outside the code is wrong: what was found, what was expected, what to do."""

    exit_status = EXIT_USER_ERROR
    is_of_site = False  # whether storage or memory of the host failed

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


class ConfigError(UserError, ValueError):
    """A setting is missing, unknown, or contradicts another one."""


class DataError(UserError):
    """A corpus, shard, manifest or tokenizer is missing, corrupted, or does not fit the run."""


class EmptyLaneError(DataError):
    """A corpus has too little text for the lanes of a run."""


class NodeError(UserError):
    """This node lacks something that the job needs; on another node the same settings work."""

    exit_status = EXIT_NODE_UNUSABLE


@contextlib.contextmanager
def named_setting(name: str) -> Iterator[None]:
    """Put the name of a setting before the message of a UserError of the block."""
    try:
        yield
    except UserError as error:
        error.args = (f"{name}: {error}",)
        raise


def own_status(error: Exception) -> int:
    """Return the exit status of an error by its class."""
    return error.exit_status if isinstance(error, UserError) else EXIT_USER_ERROR


def is_of_site(error: BaseException) -> bool:
    """Whether this error or one of its causes is a failure of the host's storage or memory, and
    not of what the user asked for."""
    if isinstance(error, OSError) and error.errno in (*STORAGE_FAILS, *NO_SPACE, errno.ENOMEM):
        return True
    if isinstance(error, MemoryError) or (isinstance(error, UserError) and error.is_of_site):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_of_site(cause)


def printable(text: str) -> str:
    """Return the text with escapes for control characters, except line ends and tabs."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character)[0] != "C"
        else ascii(character)[1:-1]
        for character in text
    )


def is_one_line(text: str) -> bool:
    """Whether the text is one line without control characters and other invisible ones."""
    if text.isascii():
        return text.isprintable()  # the same, many times faster
    return not any(unicodedata.category(character) in _UNPRINTABLE for character in text)


def represented(value: object) -> str:
    """Return `repr` of a value without its secrets, or its type if `repr` fails.

    Secrets are hidden before callers cut the text: in a cut URL a password is not recognized.
    """
    try:
        return redacted(repr(value))
    except (ValueError, RecursionError):  # an integer of 5,000 digits, a list in lists in lists
        return f"of type {type(value).__name__}"


def shown(value: object) -> str:
    """Return a value as a message shows it: on one line, and at most 60 characters."""
    text = represented(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def shown_id(name: str) -> str:
    """Return a document's id as one line: as JSON if a character is not printable."""
    return name if name.isprintable() else json.dumps(name)


def short(text: str) -> str:
    """Return the text without the middle of very long words, such as a text given as a path."""
    return _LONG_WORD.sub(r"\1[...]\2", text)


def print_error(text: str) -> None:
    """Write an error as one line of stderr."""
    print(f"error: {printable(redacted(text))}", file=sys.stderr)


def exit_status_of(
    command: Callable[[], int],
    report: Callable[[str], None] = print_error,
    status_of: Callable[[Exception], int] = own_status,
) -> int:
    """Run a command and return its exit status; after an error, `status_of` returns it.

    An error that a user can cause is reported as one line, by default on stderr; others are raised.
    """
    try:
        return command()
    except UserError as error:
        report(short(str(error)))
        return status_of(error)
    except BrokenPipeError:
        # The reader of our output exited (`... | head`). Closing stderr keeps Python from
        # reporting the failed flush of stdout at exit.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno is None:
            raise
        report(short(_report(error)))
        return status_of(error)
    except MemoryError as error:
        report("the host has no memory left; free some, or use a host with more")
        return status_of(error)
    except RuntimeError as error:
        # Before Python 3.13, Path.resolve raises RuntimeError at a circle of links.
        if not isinstance(cause := error.__context__, OSError) or cause.errno != errno.ELOOP:
            raise
        report(short(_report(cause)))
    except KeyboardInterrupt:
        say_interrupted()
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR


def os_error_text(error: Exception) -> str:
    """Return an OSError's file and reason: `RUN/metrics.jsonl: No space left on device`.

    For another error, return its message.
    """
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error)
    if _is_out_of_inodes(error):
        reason = "No inodes left on device (it has space, but can hold no more files)"
    return f"{path}: {reason}" if (path := _path_of(error)) else reason


def remedy_of(error: OSError) -> str:
    """Return what to do about an error, without a full stop: `free disk space`."""
    number = error.errno
    if number == errno.EDQUOT:
        return "free space within the quota, or have it raised"
    if number == errno.EFBIG:
        return "allow larger files (ulimit -f)"
    if number == errno.ENOSPC:
        return "delete files" if _is_out_of_inodes(error) else "free disk space"
    if number in NO_PERMISSION:
        return "give this user the permissions, or choose another path"
    if number == errno.EEXIST:
        return "choose another path, or remove it"
    if number in TOO_MANY_OPEN:
        return "allow more open files (ulimit -n)"
    if number == errno.ENOMEM:
        return "free some of the host's memory, or use a host with more"
    if number in STORAGE_FAILS:
        return "check the disk or file server"
    return "check the path" if _path_of(error) else "look for its cause on this host (ulimit -a)"


def _report(error: OSError) -> str:
    again = "" if error.errno not in NO_SPACE else " and run the same command again"
    kept = ": finished work is kept" if again else ""
    return f"{os_error_text(error)}; {remedy_of(error)}{again}{kept}"


def _path_of(error: OSError) -> str:
    """Return the error's file, or the folder that denies access to it.

    '' if the error has no name, or has a descriptor's number instead.
    """
    if not isinstance(error.filename, str | bytes):
        return ""
    name = os.fsdecode(error.filename)
    for folder in reversed(Path(name).parents) if error.errno == errno.EACCES else ():
        if folder.is_dir() and not os.access(folder, os.X_OK):
            return str(folder)
    return name


def _is_out_of_inodes(error: OSError) -> bool:
    """Whether a "full" file system has space left, but no inode for another file."""
    if error.errno != errno.ENOSPC or not (name := _path_of(error)):
        return False
    for folder in Path(name).absolute().parents:
        with contextlib.suppress(OSError):  # a folder that was not created: try its parent
            system = os.statvfs(folder)
            # File systems without a fixed number of inodes (Btrfs) report 0 for all counts.
            return bool(system.f_files and not system.f_favail and system.f_bavail)
    return False


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return the end of an error message: the closest of `names`, or all if none is close."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; expected one of: {', '.join(sorted(names))[:LONGEST_LIST]}" if names else ""
