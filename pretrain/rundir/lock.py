"""Locks of a run directory: RUN/launcher.lock, RUN/train.lock, RUN/submit.lock. Torch-free.

    {"pid": 4711, "holder": "launcher", "hostname": "n1"}

The file stays when its holder ends; the kernel then drops the lock, whatever ended the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.checked_fields import Fields, InvalidField
from data_pipeline.errors import ConfigError
from data_pipeline.file_lock import held_lock, is_locked_by
from data_pipeline.files import read_json


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The last process that took a lock."""

    pid: int
    holder: str
    hostname: str
    since: float
    is_held: bool | None  # None where only its own host could tell


@contextlib.contextmanager
def exclusive_lock(path: Path, holder: str, is_fenced: bool = False) -> Iterator[None]:
    """Hold the lock `path`, at the latest until this process ends; ConfigError names another
    holder.

    A fenced process continues next to a holder on another host: that host may be cut off from the
    network, and then nobody can release its lock; the token of its attempt keeps it from writing.
    """
    with held_lock(path) as file:
        if file is None:
            lock = read_lock(path)
            if is_fenced and lock and lock.hostname != socket.gethostname():
                yield
                return
            raise ConfigError(
                f"{path.parent} is in use by {_name_of(lock)}; "
                "wait for it, stop it, or choose another run directory"
            )
        file.truncate(0)
        owner = {"pid": os.getpid(), "holder": holder, "hostname": socket.gethostname()}
        file.write(json.dumps(owner).encode() + b"\n")
        file.flush()
        yield


def _name_of(lock: Lock | None) -> str:
    if lock is None or lock.is_held is False:  # who wrote the file last is not who holds it
        return "a process that is not known"
    named = f"process {lock.pid} ({lock.holder}) on {lock.hostname}"
    return named if lock.is_held else f"a process that only its host knows, the last was {named}"


def read_lock(path: Path) -> Lock | None:
    """Who took the lock last, and whether it is still held; None if it was never taken.

    Also None if this user may not look.
    """
    try:
        owner, since = Fields(read_json(path)), path.stat().st_mtime
        pid, hostname = owner.integer("pid"), owner.text("hostname")
        holder = owner.text("holder")
    except (FileNotFoundError, PermissionError):
        return None
    except (ValueError, InvalidField):  # it is being taken now, or damaged
        return None
    is_held = is_locked_by(pid, path) if hostname == socket.gethostname() else None
    return Lock(pid=pid, holder=holder, hostname=hostname, since=since, is_held=is_held)
