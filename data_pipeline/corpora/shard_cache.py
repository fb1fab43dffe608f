"""Shards of remote corpora on this node's disk, in a size limit shared by all its processes.

CACHE/shards/SHA256        complete and checked; share-locked while a reader has it open
CACHE/incoming/SHA256.N    N bytes reserved by a download, whose process holds the shard's lock
CACHE/lengths/SHA256       the lengths of its documents, see below
CACHE/locks/000 ... fff    one lock per shard, by the first digits of its SHA-256
CACHE/room.lock            held while a process evicts and reserves, see below

The cache removes nothing in these directories but what has such a name, and is a directory of this
user into which no other can write. Locks are released when their process
dies, so a reservation whose lock is free was left by a killed process. An open shard is never
evicted: the lock on the file itself, taken before the file gets its name, protects it. So the cache
needs a file system with flock.

The lengths of the documents of remote shards, on this node's disk.

CACHE/lengths/SHA256        of the shard with that hash, as SHARD.lengths (lengths.py)

Every reading checks them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.fetch import fetch_lengths, fetch_shard
from data_pipeline.corpora.lengths import (
    InvalidLengths,
    lengths_bytes,
    read_lengths,
)
from data_pipeline.corpora.manifest import FileState, ShardInfo, file_state, mismatch_of
from data_pipeline.corpora.stores import Store
from foundation.errors import DataError
from foundation.files import fsync_directory, path_below, private_directory
from foundation.locks import (
    exclusive_lock,
    held_lock,
    open_shared,
    try_lock,
)

_FILE_NAME = re.compile(r"[0-9a-f]{64}")


class CacheSpace:
    """At most `limit` bytes of files and of what `reserved` counts.

    The time of a file's last access is that of its last use. `evict` removes a file and returns
    whether it could. Callers of one directory take turns, by a lock.
    """

    def __init__(
        self,
        files: Path,
        limit: int,
        evict: Callable[[Path], bool],
        reserved: Callable[[], int] = lambda: 0,
    ) -> None:
        self._files, self._limit, self._evict_file, self._reserved = files, limit, evict, reserved

    def make(self, size: int) -> bool:
        """Remove what was used least recently until `size` bytes fit; whether they do."""
        with os.scandir(self._files) as entries:
            found = [
                (status.st_atime_ns, status.st_size, entry.name)
                for entry in entries
                if _FILE_NAME.fullmatch(entry.name) and (status := entry.stat())
            ]
        used = sum(bytes_used for _, bytes_used, _ in found) + self._reserved()
        for _, bytes_used, name in sorted(found):
            if used + size <= self._limit:
                break
            with contextlib.suppress(FileNotFoundError):  # removed by hand
                if self._evict_file(self._files / name):
                    used -= bytes_used
        return used + size <= self._limit


SPACE_SECONDS = 120.0
WAITERS = 4  # processes that may fail to fetch a file one after another while this one waits


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

    def get(self, store: Store, info: ShardInfo) -> np.ndarray:
        """Return the lengths, fetched if absent."""
        if (found := self.find(info)) is not None:
            return found
        longest = WAITERS * store.retry_policy.longest(lengths_bytes(info))
        with exclusive_lock(self._locks / f"{info.sha256[:3]}.lengths", longest):
            if (found := self.find(info)) is not None:
                return found
            path = path_below(self._directory, info.sha256)
            with exclusive_lock(self._space_lock, SPACE_SECONDS):
                self._space.make(lengths_bytes(info))  # lengths that never fit are kept alone
            fetch_lengths(store, info, path, self._directory)
            return read_lengths(path, info)


def _remove(path: Path) -> bool:
    path.unlink()
    return True


EVICTION_SECONDS = 120.0  # eviction takes a few milliseconds
EVICTION_PAUSE = 0.02
GIB = 1 << 30
LENGTHS_SHARE = 16  # of the limit, in addition to it
RESERVATION_NAME = re.compile(r"([0-9a-f]{64})\.([0-9]{1,16})")


class CacheFullError(DataError):
    """Everything in the cache is in use."""


class ShardCache:
    """Shards by their hash: fetched once for all processes, verified before they get a name."""

    def __init__(self, config: CacheConfig) -> None:
        self.directory = config.path
        self.limit = int(config.gib * GIB)
        self._shards, self._incoming, self._locks = (
            self.directory / name for name in ("shards", "incoming", "locks")
        )
        self._verified: dict[str, FileState] = {}  # as each shard was when it was checked
        private_directory(self.directory)
        for directory in (self._shards, self._incoming, self._locks):
            private_directory(directory)
        self._space = CacheSpace(self._shards, self.limit, self._evict, self._reserved)
        self.lengths = LengthCache(self.directory, self._locks, self.limit // LENGTHS_SHARE)

    def open(self, store: Store, info: ShardInfo, is_urgent: bool = True) -> BinaryIO:
        """Open the shard's file, fetched if absent. It is kept as long as it is open or mapped.

        CacheFullError if there is no space; an urgent call first waits as long as a download may
        take for other processes to close shards.
        """
        # Wait for others that fetch this shard, even if they fail one after another, but not
        # forever: one of them may be stopped (SIGSTOP).
        longest = WAITERS * store.retry_policy.longest(info.size)
        with exclusive_lock(self._lock_of(info.sha256), longest):
            return self._find(info) or self._transfer(store, info, is_urgent)

    def fetch(self, store: Store, info: ShardInfo) -> None:
        """Fetch the shard for a later `open`; do nothing if there is no space."""
        with contextlib.suppress(CacheFullError):
            self.open(store, info, is_urgent=False).close()

    def check_capacity(self, num_shards: int, largest: int) -> None:
        """Raise DataError unless that many shards of at most `largest` bytes can be open."""
        if (needed := num_shards * largest) > self.limit:
            raise DataError(
                f"data.cache.gib={self.limit / GIB:.4g} is too small: a node's ranks have up to "
                f"{num_shards} shards of {largest:,} bytes open at the same time; set it to "
                f"{1.05 * needed / GIB:.3g} or more, or use fewer lanes"
            )

    def _lock_of(self, name: str) -> Path:
        return self._locks / name[:3]

    def _find(self, info: ShardInfo) -> BinaryIO | None:
        """Open the shard's file if it is in the cache and valid; the caller holds its lock."""
        path = path_below(self._shards, info.sha256)
        try:
            file = open_shared(path)
        except FileNotFoundError:
            return None
        # No link left: it was evicted between the opening and the locking.
        is_linked = os.fstat(file.fileno()).st_nlink > 0
        state = file_state(file)
        is_checked = self._verified.get(info.sha256) == state
        if is_linked and mismatch_of(file, info, with_hash=not is_checked) is None:
            self._verified[info.sha256] = state
            # The time of the last use; the one of the last change tells whether it was changed.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            return file
        file.close()
        return None

    def _transfer(self, store: Store, info: ShardInfo, is_urgent: bool) -> BinaryIO:
        longest = store.retry_policy.seconds_for(info.size) if is_urgent else 0.0
        reserved = self._reserve(info, longest)
        arrived = path_below(reserved, info.sha256)
        try:
            fetch_shard(store, info, arrived, reserved)
            # Lock it before it gets its name: no other process can evict it in between.
            file = open_shared(arrived)
            os.replace(arrived, self._shards / info.sha256)
            fsync_directory(self._shards)
        finally:
            shutil.rmtree(reserved, ignore_errors=True)
        self._verified[info.sha256] = file_state(file)
        return file

    def _reserve(self, info: ShardInfo, seconds: float) -> Path:
        """Make a directory with reserved space to download into; CacheFullError after `seconds`."""
        if info.size > self.limit:
            raise CacheFullError(
                f"{info.path} of {info.size:,} bytes is larger than the cache {self.directory} of "
                f"{self.limit / GIB:.4g} GiB; raise data.cache.gib, or check the corpus"
            )
        reserved = path_below(self._incoming, f"{info.sha256}.{info.size}")
        shutil.rmtree(reserved, ignore_errors=True)  # left by a killed process: we hold its lock
        deadline = time.monotonic() + seconds
        while True:
            with self._room():
                if self._space.make(info.size):
                    reserved.mkdir()
                    return reserved
            if time.monotonic() > deadline:
                raise CacheFullError(
                    f"the cache {self.directory} has no space for {info.path} of {info.size:,} "
                    f"bytes: shards in use fill its {self.limit / GIB:.4g} GiB; raise "
                    "data.cache.gib in all runs that share it"
                )
            time.sleep(EVICTION_PAUSE)

    def _room(self) -> contextlib.AbstractContextManager[None]:
        return exclusive_lock(self.directory / "room.lock", EVICTION_SECONDS)

    def _evict(self, path: Path) -> bool:
        """Remove a shard, unless a process has it open; whether it was removed."""
        with open(path, "rb") as file:
            if is_free := try_lock(file):
                path.unlink()
            return is_free

    def _reserved(self) -> int:
        """Return the bytes of active downloads, and remove those of killed processes."""
        total = 0
        for directory in self._incoming.iterdir():
            if not (match := RESERVATION_NAME.fullmatch(directory.name)):
                continue
            with held_lock(self._lock_of(match[1])) as lock:
                if lock is not None:
                    shutil.rmtree(directory, ignore_errors=True)
                else:
                    total += int(match[2])
        return total
