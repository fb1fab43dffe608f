"""Locks between processes and threads, which end with their holder, whatever ended it.

On file systems without `flock`, such as Lustre mounted without it or NFS without a lock server, an
owner file takes its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, BinaryIO

from foundation.errors import DataError
from foundation.files import named_errors, read_json
from foundation.records import from_json, shown

TOUCH_SECONDS = 10.0
PATIENCE_SECONDS = 120.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a lock, as nobody else describes itself."""

    token: str  # of this taking of the lock
    hostname: str
    machine: str  # differs between machines, between boots and between containers' process tables
    pid: int
    started: str  # the kernel's clock when the process began: ids are used again


class OwnerFile:
    """The lock `path`, held or not by this object."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}.owner")
        self._owner: Owner | None = None
        self._released = threading.Event()

    def try_acquire(self) -> bool:
        """Whether this object holds the lock now."""
        return self._create() or (self.remove_left() and self._create())

    def release(self) -> None:
        """Let others take the lock; done once."""
        self._released.set()
        if self._owner is not None and self._owner.pid == os.getpid() and self._is_ours():
            self.path.unlink(missing_ok=True)
        self._owner = None

    def is_held(self) -> bool | None:
        """Whether its holder is alive; None if only another machine, or time, can tell."""
        owner = _read(self.path)
        if owner is None:  # no file, or one whose maker was killed, or is about to write it
            return None if self.path.exists() else False
        if owner.machine != _machine():
            return None
        return start_of(owner.pid) == owner.started != ""

    def is_held_by(self, pid: int) -> bool | None:
        """Whether the process `pid` of this machine is its holder; None as in `is_held`."""
        owner = _read(self.path)
        return self.is_held() if owner is None or owner.pid == pid else False

    def holder(self) -> str:
        """Return the process that has the lock, for messages; "" if no file names one."""
        owner = _read(self.path)
        return "" if owner is None else f"process {owner.pid} on {shown(owner.hostname)}"

    def remove_left(self) -> bool:
        """Whether the file of a dead holder was there and is removed now."""
        left = _read(self.path)
        is_held = self.is_held()
        if is_held or (is_held is None and self._silence() < PATIENCE_SECONDS):
            return False
        aside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            self.path.rename(aside)
            if _read(aside) != left:  # another process was faster and holds it now: put it back
                os.link(aside, self.path)
                return False
        except FileNotFoundError:
            return True  # released, or removed by another process
        except OSError:
            return False
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _create(self) -> bool:
        owner = Owner(
            token=secrets.token_hex(8),
            hostname=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=start_of(os.getpid()),
        )
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        try:
            with named_errors(self.path), open(file, "w") as text:
                json.dump(asdict(owner), text)
        except OSError:  # a full disk
            self.path.unlink()
            raise
        self._owner = owner
        threading.Thread(target=self._touch, name="lock", daemon=True).start()
        return True

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_SECONDS):
            if not self._is_ours():
                _log.warning("%s was taken by another process: this one was silent", self.path)
                return
            with contextlib.suppress(OSError):  # the disk may be full, or away for a while
                os.utime(self.path)

    def _is_ours(self) -> bool:
        return self._owner is not None and _read(self.path) == self._owner

    def _silence(self) -> float:
        """Seconds since the holder touched the file, by the clock that wrote both times."""
        probe = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            probe.touch()
            return probe.stat().st_mtime - self.path.stat().st_mtime
        except OSError:
            return 0.0
        finally:
            probe.unlink(missing_ok=True)


def _read(path: Path) -> Owner | None:
    try:
        return from_json(Owner, read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> str:
    return f"{boot_of_machine()} {os.stat('/proc/self/ns/pid').st_ino}"


def boot_of_machine() -> str:
    """Return what all processes under this kernel have in common, and none of another machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # some sandboxes do not have it
        return socket.gethostname()


def start_of(pid: int) -> str:
    """Return when a process of this machine began, in ticks since boot; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]


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
