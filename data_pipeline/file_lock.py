"""Locks between processes and threads. They end with their holder, whatever ended it.

The only module that calls `flock`. Such a lock belongs to one opening of a file: a second opening
in the same process has to wait for it too, and closing the file releases it. On file systems
without `flock`, `held_lock` and `exclusive_lock` use an owner file instead, see `owner_file.py`.
There the shard cache marks what it has open instead of `open_shared`, see `use_marks.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from data_pipeline.errors import DataError
from data_pipeline.owner_file import OwnerFile

LONGEST_PAUSE = 0.05
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class NoFileLocksError(DataError):
    """The file system has no locks."""


@contextlib.contextmanager
def held_lock(path: Path) -> Iterator[BinaryIO | None]:
    """The lock file, open for reading and appending, while this process holds its lock.

    None if another opening holds it. The file stays.
    """
    with open(path, "a+b", opener=_open_private) as file, contextlib.ExitStack() as stack:
        try:
            is_ours = try_lock(file)
        except NoFileLocksError:
            owner = OwnerFile(path)
            stack.callback(owner.release)
            is_ours = owner.try_acquire()
        yield file if is_ours else None


@contextlib.contextmanager
def exclusive_lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock file `path` during the block; DataError after waiting `seconds` for others."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        with held_lock(path) as file:
            if file is not None:
                yield
                return
        if time.monotonic() > deadline:
            holder = OwnerFile(path).holder() or f"`fuser {path}`"
            raise DataError(
                f"another process has held {path} for {seconds:.0f} seconds; look for a "
                f"stopped one ({holder}), end it, and run the same command again"
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def is_locked_by(pid: int, path: Path) -> bool | None:
    """Whether this machine's process `pid` holds the lock; None if it may be another machine's.

    Looks into the kernel's table instead of trying the lock: a process that starts at that moment
    would find it taken.
    """
    if (owner := OwnerFile(path)).path.exists():
        return owner.is_held_by(pid)
    entry = re.compile(rf"FLOCK +ADVISORY +WRITE +{pid} \S+:{path.stat().st_ino} ")
    return entry.search(Path("/proc/locks").read_text()) is not None


def try_lock(file: IO) -> bool:
    """Whether no other opening held a lock on the file; if so, this one now has the lock."""
    return _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_shared(path: Path) -> BinaryIO:
    """Open a file for reading with a shared lock: until it is closed, `try_lock` on it fails."""
    file = open(path, "rb")  # noqa: SIM115  (the caller closes it)
    try:
        _flock(file, fcntl.LOCK_SH)
    except BaseException:
        file.close()
        raise
    return file


def _flock(file: IO, operation: int) -> bool:
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        raise NoFileLocksError(
            f"{file.name}: found a file system without file locks (flock: {error.strerror}), "
            "expected one with them; use a local disk"
        ) from None
    return True


def _open_private(path: str, flags: int) -> int:
    # 0600: whoever can open a lock file can hold the lock. Also one that was copied with its modes.
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not a regular file, expected a lock; remove it")
    with contextlib.suppress(PermissionError):  # another user's: whoever shares this directory
        os.fchmod(descriptor, 0o600)
    return descriptor
