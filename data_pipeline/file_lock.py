"""Locks between processes and threads. The kernel releases them when their holder dies.

The only module that calls `flock`. Such a lock belongs to one opening of a file: a second opening
in the same process has to wait for it too, and closing the file releases it.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from data_pipeline.errors import DataError

LONGEST_PAUSE = 0.05


@contextlib.contextmanager
def exclusive_lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock file `path` during the block; DataError after waiting `seconds` for others."""
    deadline, pause = time.monotonic() + seconds, 0.001
    with open(path, "ab") as lock:
        while not try_lock(lock):
            if time.monotonic() > deadline:
                raise DataError(
                    f"another process has held {path} for {seconds:.0f} seconds; look for a "
                    f"stopped one (`fuser {path}`), end it, and run the same command again"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        yield


def try_lock(file: IO) -> bool:
    """Whether no other opening held a lock on the file; if so, this one now has the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_shared(path: Path) -> BinaryIO:
    """Open a file for reading with a shared lock: until it is closed, `try_lock` on it fails."""
    file = open(path, "rb")  # noqa: SIM115  (the caller closes it)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file
