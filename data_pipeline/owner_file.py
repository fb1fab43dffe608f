"""A lock for file systems without `flock`, such as Lustre mounted without it or NFS without lockd.

    PATH.owner    exists while the lock PATH is held; its holder touches it every few seconds

Where the kernel does not release a dead process's lock, others must judge whether it is dead. On
the same machine they look the process up, by its id and start time. From elsewhere they cannot: a
holder is taken for dead if it has not touched the file for `PATIENCE_SECONDS`, by the file
system's own clock.

The limits: a lock left on a machine that went down stays held for that long. A holder that is
suspended or cut off for longer loses it to a process on another machine, and says so when it
returns; the ranks of a Slurm job are fenced against that (`pretrain/rundir/fence.py`). A file
system that has `flock` on some nodes only is not protected, because both kinds of lock must not be
mixed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from data_pipeline.checked_fields import shown
from data_pipeline.files import named_errors, read_json
from data_pipeline.typed_json import from_json

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
