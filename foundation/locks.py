"""Locks between processes and threads. A lock ends with its holder, even one that was killed.

Some file systems have no locks, such as Lustre mounted without `flock` or NFS without a lock
server. A warning then says that nothing keeps a second process out. Of two attempts of a run, the
older one still stops: the newer one has fenced it off.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from foundation.errors import DataError

LONGEST_PAUSE = 0.05  # seconds between two tries
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_log = logging.getLogger(__name__)


class NoFileLocksError(DataError):
    """The file system has no locks."""


@contextlib.contextmanager
def held_lock(path: Path) -> Iterator[BinaryIO | None]:
    """Yield the lock file, open for reading and appending, while this process holds its lock.

    Yield None if another opening of the file holds the lock. The file stays.
    """
    with open(path, "a+b", opener=_open_private) as file:
        try:
            is_ours = try_lock(file)
        except NoFileLocksError:
            _log.warning(
                "%s: the file system has no file locks (flock), so nothing keeps a second process "
                "out; start no other one there",
                path,
            )
            is_ours = True
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
            raise DataError(
                f"another process has held {path} for {seconds:.0f} seconds; look for a "
                f"stopped one (`fuser {path}`), end it, and run the same command again"
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def is_locked_by(pid: int, path: Path) -> bool:
    """Whether this machine's process `pid` holds the lock.

    This reads the kernel's table. To try the lock would take it for a moment, and a process that
    starts then would find it taken.
    """
    entry = re.compile(rf"FLOCK +ADVISORY +WRITE +{pid} \S+:{path.stat().st_ino} ")
    with open("/proc/locks") as table:
        return any(entry.search(line) for line in table)


def try_lock(file: IO) -> bool:
    """Take the lock unless another opening of the file has one; return whether it was taken."""
    return _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_shared(path: Path) -> BinaryIO:
    """Open a file for reading with a shared lock: until it is closed, `try_lock` on it fails."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115  (the caller closes it)
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


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # do not wait for the writer of a FIFO


def _open_private(path: str, flags: int) -> int:
    # 0600: everyone who can open a lock file can hold its lock.
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} is not a regular file, expected a lock; remove it")
    with contextlib.suppress(PermissionError):  # a file of another user who shares the directory
        os.fchmod(descriptor, 0o600)  # the file may exist, copied with another mode
    return descriptor
