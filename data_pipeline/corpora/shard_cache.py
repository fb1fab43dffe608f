"""The node's cache of shards of remote corpora, which all processes share with its size limit.

CACHE/shards/SHA256        complete and checked; share-locked while a reader has it open
CACHE/incoming/SHA256.N    N bytes reserved by a download, whose process holds the file's lock
CACHE/locks/000 ... fff    one lock per file, by the first digits of its SHA-256
CACHE/room.lock            held while a process evicts and reserves

The cache removes only files with such names, and only this user can write into its directory. Locks
are released when their process dies, so a reservation whose lock is free was left by a killed
process. An open file is never evicted: the lock on the file itself, taken before the file gets its
name, protects it. So the cache needs a file system with flock.
"""

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.fetch import fetch_shard
from data_pipeline.corpora.lengths import InvalidLengths, lengths_bytes, lengths_file, lengths_in
from data_pipeline.corpora.manifest import (
    FileState,
    ShardInfo,
    file_state,
    lengths_name,
    mismatch_of,
)
from data_pipeline.corpora.stores import Store
from foundation.errors import DataError
from foundation.files import move
from foundation.locks import exclusive_lock, held_lock, open_shared, try_lock
from foundation.ownership import private_directory
from foundation.paths import path_below
from foundation.typed_values import is_sha256

WAITERS = 4  # processes that may fail to fetch a file one after another while this one waits
EVICTION_SECONDS = 120.0  # longest wait for others that evict, which takes a few milliseconds
EVICTION_PAUSE = 0.02  # seconds between two tries to make room
GIB = 1 << 30
RESERVATION_NAME = re.compile(r"([0-9a-f]{64})\.([0-9]{1,16})")


class CacheFullError(DataError):
    """Everything in the cache is in use."""


class ShardCache:
    """Files by their hash: fetched once for all processes, verified before they get a name."""

    def __init__(self, config: CacheConfig) -> None:
        self.directory = config.path
        self.limit = int(config.gib * GIB)
        self._shards, self._incoming, self._locks = (
            self.directory / name for name in ("shards", "incoming", "locks")
        )
        self._verified: dict[str, FileState] = {}  # SHA-256 -> the file's state when it was hashed
        private_directory(self.directory)
        for directory in (self._shards, self._incoming, self._locks):
            private_directory(directory)

    def open(
        self, store: Store, info: ShardInfo, is_urgent: bool = True, must_fit: bool = True
    ) -> BinaryIO:
        """Open the file of that entry; fetch it if absent. While open or mapped, it stays cached.

        CacheFullError if there is no space and the file `must_fit`. An urgent call first waits for
        other processes to close shards, as long as a download may take.
        """
        # Wait for others that fetch this shard, even if they fail one after another, but not
        # forever: one of them may be stopped (SIGSTOP).
        longest = WAITERS * store.retry_policy.longest(info.size)
        with exclusive_lock(self._lock_of(info.sha256), longest):
            return self._find(info) or self._transfer(store, info, is_urgent, must_fit)

    def lengths(self, store: Store, info: ShardInfo) -> np.ndarray:
        """Return the tokens of each document of a shard. If absent, the small file is fetched even
        where shards in use fill the cache."""
        with self.open(store, lengths_file(info), must_fit=False) as file:
            file.seek(0)  # it may just have been hashed
            try:
                return lengths_in(file.read(lengths_bytes(info)), info)
            except InvalidLengths as error:
                name = f"{store.url}/{lengths_name(info.path)}"
                raise DataError(f"{name} is corrupted: {error}; build the corpus again") from None

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
        # A file without links was evicted between opening and locking it.
        is_linked = os.fstat(file.fileno()).st_nlink > 0
        state = file_state(file)
        is_checked = self._verified.get(info.sha256) == state
        if is_linked and mismatch_of(file, info, with_hash=not is_checked) is None:
            self._verified[info.sha256] = state
            # Set the time of last use, and keep the time of last change, part of the file's state.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
            return file
        file.close()
        return None

    def _transfer(self, store: Store, info: ShardInfo, is_urgent: bool, must_fit: bool) -> BinaryIO:
        longest = store.retry_policy.seconds_for(info.size) if is_urgent else 0.0
        reserved = self._reserve(info, longest, must_fit)
        arrived = path_below(reserved, info.sha256)
        try:
            fetch_shard(store, info, arrived, reserved)
            # Lock it before it gets its name: no other process can evict it in between.
            file = open_shared(arrived)
            move(arrived, self._shards / info.sha256)
        finally:
            shutil.rmtree(reserved, ignore_errors=True)
        self._verified[info.sha256] = file_state(file)
        return file

    def _reserve(self, info: ShardInfo, seconds: float, must_fit: bool) -> Path:
        """Make a directory with reserved space to download into; CacheFullError after `seconds`."""
        if must_fit and info.size > self.limit:
            raise CacheFullError(
                f"{info.path} of {info.size:,} bytes is larger than the cache {self.directory} of "
                f"{self.limit / GIB:.4g} GiB; raise data.cache.gib, or check the corpus"
            )
        reserved = path_below(self._incoming, f"{info.sha256}.{info.size}")
        shutil.rmtree(reserved, ignore_errors=True)  # left by a killed process: we hold its lock
        deadline = time.monotonic() + seconds
        while True:
            with exclusive_lock(self.directory / "room.lock", EVICTION_SECONDS):
                if self._make_room(info.size) or not must_fit:
                    reserved.mkdir()
                    return reserved
            if time.monotonic() > deadline:
                raise CacheFullError(
                    f"the cache {self.directory} has no space for {info.path} of {info.size:,} "
                    f"bytes: shards in use fill its {self.limit / GIB:.4g} GiB; raise "
                    "data.cache.gib in all runs that share it"
                )
            time.sleep(EVICTION_PAUSE)

    def _make_room(self, size: int) -> bool:
        """Evict the least recently used shards until `size` bytes fit; return whether they do."""
        with os.scandir(self._shards) as entries:
            shards = [
                (status.st_atime_ns, status.st_size, entry.name)
                for entry in entries
                if is_sha256(entry.name) and (status := entry.stat())
            ]
        used = sum(bytes_used for _, bytes_used, _ in shards) + self._reserved()
        for _, bytes_used, name in sorted(shards):
            if used + size <= self.limit:
                break
            with contextlib.suppress(FileNotFoundError):  # removed by hand
                if self._evict(self._shards / name):
                    used -= bytes_used
        return used + size <= self.limit

    def _evict(self, path: Path) -> bool:
        """Remove a shard unless a process has it open; return whether it was removed."""
        with open(path, "rb") as file:
            if is_free := try_lock(file):
                path.unlink()
            return is_free

    def _reserved(self) -> int:
        """Return the bytes of active downloads, and remove what killed processes left."""
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
