"""Locks between processes (and threads) that the kernel releases when their holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import DataError

LONGEST_PAUSE = 0.05


@contextlib.contextmanager
def exclusive_lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock file `path` during the block; DataError when others hold it for longer than `seconds`."""
    deadline, pause = time.monotonic() + seconds, 0.001
    with open(path, "ab") as lock:
        while not try_lock(lock):
            if time.monotonic() > deadline:
                raise DataError(
                    f"another process has held {path} for {seconds:.0f} seconds; look for one that is stopped "
                    f"(`fuser {path}`), end it, and run the same command again"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        yield


def try_lock(file: BinaryIO) -> bool:
    """Lock an open file for this opening of it alone, if nobody has it locked; closing the file releases it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
