"""The lengths of the documents of remote shards, on this node's disk.

CACHE/lengths/SHA256        of the shard with that hash, as SHARD.lengths (lengths.py)

They come from the store if the manifest lists them, else from the shards that were read. Every
reading checks them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from data_pipeline.corpora.cache_space import CacheSpace
from data_pipeline.corpora.fetch import fetch_lengths
from data_pipeline.corpora.lengths import (
    LARGEST_LENGTH,
    InvalidLengths,
    lengths_bytes,
    lengths_content,
    read_lengths,
)
from data_pipeline.corpora.manifest import ShardInfo
from data_pipeline.corpora.stores import Store
from data_pipeline.errors import DataError
from data_pipeline.file_lock import exclusive_lock
from data_pipeline.files import atomic_write, path_below
from data_pipeline.ownership import private_directory

SPACE_SECONDS = 120.0
WAITERS = 4  # as of a shard, see shard_cache.py


class LengthCache:
    """Lengths by the hash of their shard: fetched once for all processes of the node."""

    def __init__(self, cache: Path, locks: Path, limit: int) -> None:
        self._directory, self._locks = private_directory(cache / "lengths"), locks
        self._space_lock = cache / "lengths.lock"
        self._space = CacheSpace(self._directory, limit, _remove)

    def find(self, info: ShardInfo) -> np.ndarray | None:
        """Return the lengths of the shard's documents; None if the cache has none."""
        path = path_below(self._directory, info.sha256)
        try:
            found = read_lengths(path, info)
        except (InvalidLengths, FileNotFoundError):
            return None
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return found

    def get(self, store: Store, info: ShardInfo) -> np.ndarray | None:
        """Return the lengths, fetched if absent; None if only the shard has them."""
        if (found := self.find(info)) is not None or not info.lengths:
            return found
        longest = WAITERS * store.retry_policy.longest(lengths_bytes(info))
        with exclusive_lock(self._locks / f"{info.sha256[:3]}.lengths", longest):
            if (found := self.find(info)) is not None:
                return found
            path = path_below(self._directory, info.sha256)
            self._make_space(info)
            fetch_lengths(store, info, path, self._directory)
            return read_lengths(path, info)

    def keep(self, info: ShardInfo, lengths_D: np.ndarray) -> None:
        """Keep the lengths of a shard that was read, if no file lists them and the disk has
        space."""
        path = path_below(self._directory, info.sha256)
        if info.lengths or path.exists() or int(lengths_D.max()) > LARGEST_LENGTH:
            return
        with contextlib.suppress(OSError, DataError):
            self._make_space(info)
            with atomic_write(path, sync=False) as file:
                file.write(lengths_content(info.sha256, lengths_D))

    def _make_space(self, info: ShardInfo) -> None:
        """Remove other lengths until those of the shard fit; one that never does is kept alone."""
        with exclusive_lock(self._space_lock, SPACE_SECONDS):
            self._space.make(lengths_bytes(info))


def _remove(path: Path) -> bool:
    path.unlink()
    return True
