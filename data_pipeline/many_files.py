"""Many small files at once. On a network file system each open waits for a server, mostly alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_NUM_THREADS = 32
_FEW = 4  # not worth a thread


def read_together(read: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """Return what `read` makes of each of the files, in their order; up to 32 at a time."""
    if len(paths) <= _FEW:
        return [read(path) for path in paths]
    with ThreadPoolExecutor(min(_NUM_THREADS, len(paths))) as pool:
        return list(pool.map(read, paths))
