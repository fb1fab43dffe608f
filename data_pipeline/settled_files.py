"""Whether a file is as it was when it was parsed, so that a process need not parse it again."""

from __future__ import annotations

import time
from pathlib import Path

SETTLED_NS = 100_000_000


def settled_state(path: Path) -> tuple[int, ...] | None:
    """Return what changes with a file's contents.

    None if it has changed a moment ago: its times would not tell a second change that follows.
    """
    status = path.stat()
    if time.time_ns() - status.st_ctime_ns <= SETTLED_NS:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
