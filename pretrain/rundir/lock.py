"""Locks of a run directory, and the fence that keeps old attempts from writing. Torch-free.

RUN/launcher.lock, train.lock and submit.lock contain {"pid": 4711, "holder": "launcher",
"hostname": "n1"}. The kernel releases a lock when its holder ends in any way; the file stays.

RUN/attempt contains the token of the latest attempt. Ranks on a node that was cut off from the
network may still run after the run has restarted elsewhere. When they reach the directory again,
they find another token in the file and exit before they write a measurement or a checkpoint.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.errors import ConfigError, UserError
from foundation.files import named_errors, read_regular, read_value, write_text
from foundation.locks import held_lock, is_locked_by
from foundation.typed_values import json_text

# The token that a supervisor passes to its ranks, after it has claimed the run for them. Without a
# supervisor, rank 0 claims the run.
VARIABLE = "PRETRAIN_ATTEMPT"
LONGEST = 1000  # bytes of a token


class StaleAttempt(UserError):
    """Raised when a newer attempt has claimed the run."""


class Fence:
    """The right of one attempt to write into a run directory."""

    def __init__(self, run_dir: Path, token: str) -> None:
        self.token = token
        self._path = run_dir / "attempt"

    def claim(self) -> None:
        """Become the latest attempt. From now on every older one fails its `check`."""
        write_text(self._path, self.token + "\n")

    def check(self) -> None:
        """Raise StaleAttempt if a newer attempt has claimed the run."""
        try:
            newest = read_regular(self._path, LONGEST).decode(errors="replace").strip()
        except ValueError as error:
            newest = f"({error})"
        if newest != self.token:
            raise StaleAttempt(
                f"attempt {self.token} exits: attempt {newest} has claimed {self._path.parent}"
            )


@dataclass(frozen=True, kw_only=True)
class Lock:
    """The last process that took a lock."""

    pid: int
    holder: str
    hostname: str
    since: float = 0.0
    is_held: bool | None = None  # None if unknown: the process was on another host


@contextlib.contextmanager
def run_lock(path: Path, holder: str, is_fenced: bool = False) -> Iterator[None]:
    """Hold the lock during the block; raise ConfigError if another process holds it.

    A fenced process continues even if a process on another host holds the lock. That host may be
    cut off from the network, so that its lock is never released; the fence keeps it from writing.
    """
    with held_lock(path) as file:
        if file is None:
            lock, named = read_lock(path), "a process that is not known"
            if is_fenced and lock and lock.hostname != socket.gethostname():
                yield
                return
            # If the process in the file does not hold the lock, another one has just taken it and
            # not written its name yet.
            if lock and lock.is_held is not False:
                named = f"process {lock.pid} ({lock.holder}) on {lock.hostname}"
            if lock and lock.is_held is None:
                named = f"a process on another host, the last known was {named}"
            raise ConfigError(
                f"{path.parent} is in use by {named}; "
                "wait for it, stop it, or choose another run directory"
            )
        with named_errors(path.parent):
            file.truncate(0)
            owner = {"pid": os.getpid(), "holder": holder, "hostname": socket.gethostname()}
            # Write without Python's buffer: after an error, closing the file would write the buffer
            # again and raise an error that does not name the file.
            rest = json_text(owner).encode() + b"\n"
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        yield


def read_lock(path: Path) -> Lock | None:
    """Return who took the lock last and whether it is held; None if this user cannot know."""
    try:
        owner, since = read_value(Lock, path), path.stat().st_mtime
    except (FileNotFoundError, PermissionError, ValueError):
        return None  # a ValueError: damaged, or another process is just writing it
    if not (owner.holder + owner.hostname).isprintable():
        return None
    is_here = owner.hostname == socket.gethostname()
    return replace(owner, since=since, is_held=is_locked_by(owner.pid, path) if is_here else None)
