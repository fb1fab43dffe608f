"""Who may write in a run directory: its locks, and the fence of its latest attempt. Torch-free.

RUN/launcher.lock, train.lock and submit.lock contain {"pid": 4711, "holder": "launcher",
"hostname": "n1"}. The file stays when its holder ends; the kernel then drops the lock, whatever
ended the process.

RUN/attempt contains the token of the latest attempt. Ranks on a node that was cut off from the
network may still run after the run has restarted elsewhere. They find another token there, and exit
before they write a measurement or publish a checkpoint.
"""

from __future__ import annotations

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

# A supervisor claims the run for the ranks it starts and passes them the token here; ranks without
# one claim the run.
VARIABLE = "PRETRAIN_ATTEMPT"
LONGEST = 1000  # bytes of a token


class StaleAttempt(UserError):
    """A newer attempt has the run."""


class Fence:
    """The right of one attempt to write into a run directory."""

    def __init__(self, run_dir: Path, token: str) -> None:
        self.token = token
        self._path = run_dir / "attempt"

    def claim(self) -> None:
        """Become the latest attempt; every older one is fenced off from now on."""
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
    is_held: bool | None = None  # None where only its own host could tell


@contextlib.contextmanager
def run_lock(path: Path, holder: str, is_fenced: bool = False) -> Iterator[None]:
    """Hold the lock, until this process ends at the latest; ConfigError names another holder.

    A fenced process continues next to a holder on another host, which may be cut off from the
    network and then cannot release its lock: the token of its attempt keeps it from writing.
    """
    with held_lock(path) as file:
        if file is None:
            lock, named = read_lock(path), "a process that is not known"
            if is_fenced and lock and lock.hostname != socket.gethostname():
                yield
                return
            if lock and lock.is_held is not False:  # else another than who wrote the file has it
                named = f"process {lock.pid} ({lock.holder}) on {lock.hostname}"
            if lock and lock.is_held is None:
                named = f"a process that only its host knows, the last was {named}"
            raise ConfigError(
                f"{path.parent} is in use by {named}; "
                "wait for it, stop it, or choose another run directory"
            )
        with named_errors(path.parent):
            file.truncate(0)
            owner = {"pid": os.getpid(), "holder": holder, "hostname": socket.gethostname()}
            # Past the buffer, which closing would try to write again, and fail without a name.
            rest = json_text(owner).encode() + b"\n"
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        yield


def read_lock(path: Path) -> Lock | None:
    """Return who took the lock last, and whether it is still held.

    None if it was never taken, or this user may not look.
    """
    try:
        owner, since = read_value(Lock, path), path.stat().st_mtime
    except (FileNotFoundError, PermissionError, ValueError):
        return None  # also while it is being taken, or damaged
    if not (owner.holder + owner.hostname).isprintable():
        return None
    is_here = owner.hostname == socket.gethostname()
    return replace(owner, since=since, is_held=is_locked_by(owner.pid, path) if is_here else None)
