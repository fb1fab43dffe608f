"""Locks of a run directory: RUN/launcher.lock, RUN/train.lock, RUN/submit.lock. Torch-free.

    {"pid": 4711, "holder": "launcher", "hostname": "n1"}

The file stays when its holder ends; the kernel then drops the lock, whatever ended the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from data_pipeline.errors import ConfigError
from data_pipeline.file_lock import try_lock


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
    with open(path, "a+b") as file:
        if not try_lock(file):
            owner = _owner(file)
            if is_fenced and owner and owner["hostname"] != socket.gethostname():
                yield
                return
            who = (
                "process {pid} ({holder}) on {hostname}".format(**owner)
                if owner
                else "another process"
            )
            raise ConfigError(
                f"{path.parent} is in use by {who}; "
                "wait for it, stop it, or choose another --run-dir"
            )
        file.truncate(0)
        owner = {"pid": os.getpid(), "holder": holder, "hostname": socket.gethostname()}
        file.write(json.dumps(owner).encode() + b"\n")
        file.flush()
        yield


def read_lock(path: Path) -> Lock | None:
    """Who took the lock last, and whether it is still held; None if it was never taken.

    Looks into the kernel's table instead of trying the lock: a run that starts at that moment would
    find it taken.
    """
    try:
        with open(path, "rb") as file:
            owner, status = _owner(file), os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    if owner is None:  # it is being taken now
        return None
    is_held = None
    if owner["hostname"] == socket.gethostname():
        entry = re.compile(rf"FLOCK +ADVISORY +WRITE +{owner['pid']} \S+:{status.st_ino} ")
        is_held = entry.search(Path("/proc/locks").read_text()) is not None
    return Lock(**owner, since=status.st_mtime, is_held=is_held)


def _owner(file: IO[bytes]) -> dict | None:
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return {"pid": int(owner["pid"]), "holder": owner["holder"], "hostname": owner["hostname"]}
    except (ValueError, TypeError, KeyError):
        return None
