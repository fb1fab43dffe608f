"""Shards of remote corpora on this node's disk, within a limit that all processes of the node keep together.

CACHE/shards/SHA256        whole and checked; share-locked while a reader has it open, and never evicted then
CACHE/incoming/SHA256.N    N bytes promised to a download; its process holds the shard's lock
CACHE/locks/000 ... fff    one lock per shard, by the begin of its SHA-256; CACHE/room.lock: who makes room

Nothing but files in these places is ever removed. A lock dies with its process, so what a killed one has left behind
is found by its free lock. The directory must be on a local file system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data_pipeline.corpora.cache_config import CacheConfig
from data_pipeline.corpora.fetch import fetch_shard
from data_pipeline.corpora.manifest import ShardInfo, mismatch
from data_pipeline.corpora.stores import Store
from data_pipeline.errors import DataError
from data_pipeline.file_lock import exclusive_lock, open_shared, try_lock
from data_pipeline.files import fsync_directory

ROOM_SECONDS = 120.0  # making room takes a few milliseconds
ROOM_PAUSE = 0.02
WAITERS = 4  # a process waits for so many others that try in vain to fetch the shard it needs
GIB = 1 << 30


class CacheFullError(DataError):
    """Everything in the cache is in use."""


class ShardCache:
    """Shards by their content: fetched once for all processes, verified before they are named, evicted when unused."""

    def __init__(self, config: CacheConfig) -> None:
        self.directory = config.place
        self.limit = int(config.gib * GIB)
        self._shards, self._incoming, self._locks = (
            self.directory / name for name in ("shards", "incoming", "locks")
        )
        self._verified: set[str] = set()
        for directory in (self._shards, self._incoming, self._locks):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def open(self, store: Store, info: ShardInfo, is_urgent: bool = True) -> BinaryIO:
        """The shard's file, fetched unless it is there. As long as it is open (or mapped) it stays.

        CacheFullError when there is no room, nor, if it is urgent, comes any in the time a download may take.
        """
        # Waits for others who fetch it, even when they fail one after the other, but not for one that is stopped.
        with exclusive_lock(
            self._lock_of(info.sha256), WAITERS * store.patience.longest(info.size)
        ):
            return self._find(info) or self._transfer(store, info, is_urgent)

    def fetch(self, store: Store, info: ShardInfo) -> None:
        """Have the shard here, checked, for someone who opens it soon; nothing happens when there is no room."""
        with contextlib.suppress(CacheFullError):
            self.open(store, info, is_urgent=False).close()

    def check_room(self, num_shards: int, largest: int) -> None:
        """DataError unless so many shards of at most `largest` bytes can be open at once."""
        if (needed := num_shards * largest) > self.limit:
            raise DataError(
                f"data.cache.gib={self.limit / GIB:.4g} is too small: a node's ranks have up to {num_shards} shards of "
                f"{largest:,} bytes open at once; set it to {1.05 * needed / GIB:.3g} or more, or use fewer lanes"
            )

    def _lock_of(self, name: str) -> Path:
        return self._locks / name[:3]

    def _find(self, info: ShardInfo) -> BinaryIO | None:
        """The shard's file, opened and held, if it is there and in order; the caller has its lock."""
        path = self._shards / info.sha256
        try:
            file = open_shared(path)
        except FileNotFoundError:
            return None
        is_there = (
            os.fstat(file.fileno()).st_nlink > 0
        )  # else it was evicted just before it was held
        if is_there and mismatch(path, info, with_hash=info.sha256 not in self._verified) is None:
            self._verified.add(info.sha256)
            os.utime(path)  # the last use
            return file
        file.close()
        return None

    def _transfer(self, store: Store, info: ShardInfo, is_urgent: bool) -> BinaryIO:
        reserved = self._reserve(info, store.patience.seconds_for(info.size) if is_urgent else 0.0)
        arrived = reserved / info.sha256
        try:
            fetch_shard(store, info, arrived, reserved)
            file = open_shared(arrived)  # before others can see it, so that it is not evicted first
            os.replace(arrived, self._shards / info.sha256)
            fsync_directory(self._shards)
        finally:
            shutil.rmtree(reserved, ignore_errors=True)
        self._verified.add(info.sha256)
        return file

    def _reserve(self, info: ShardInfo, seconds: float) -> Path:
        """A directory to download into, for which there is room within some time; else CacheFullError."""
        reserved = self._incoming / f"{info.sha256}.{info.size}"
        shutil.rmtree(reserved, ignore_errors=True)  # of a killed process: its lock is ours now
        deadline = time.monotonic() + seconds
        while True:
            with exclusive_lock(self.directory / "room.lock", ROOM_SECONDS):
                if self._make_room(info.size):
                    reserved.mkdir()
                    return reserved
            if time.monotonic() > deadline:
                raise CacheFullError(
                    f"the cache {self.directory} has no room for {info.path} of {info.size:,} bytes: what is in use "
                    f"fills its {self.limit / GIB:.4g} GiB; set data.cache.gib to more, for all runs that share it"
                )
            time.sleep(ROOM_PAUSE)

    def _make_room(self, size: int) -> bool:
        """Evict what was used longest ago until `size` bytes fit, if they can."""
        excess = self._promised() + self._stored() + size - self.limit
        for path, stored in self._oldest_first() if excess > 0 else ():
            if excess > 0 and _evict(path):
                excess -= stored
        return excess <= 0

    def _promised(self) -> int:
        """Bytes that downloads under way will take; those of killed processes are cleared away."""
        total = 0
        for directory in self._incoming.iterdir():
            name, _, size = directory.name.partition(".")
            with open(self._lock_of(name), "ab") as lock:
                if try_lock(lock):
                    shutil.rmtree(directory, ignore_errors=True)
                else:
                    total += int(size)
        return total

    def _stored(self) -> int:
        return sum(entry.stat().st_size for entry in self._entries())

    def _oldest_first(self) -> list[tuple[Path, int]]:
        found = [(entry.stat(), entry.path) for entry in self._entries()]
        return [
            (Path(path), status.st_size)
            for status, path in sorted(found, key=lambda item: item[0].st_mtime_ns)
        ]

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self._shards) as entries:
            yield from entries


def _evict(path: Path) -> bool:
    """Remove a shard that no process has open."""
    with open(path, "rb") as file:
        if not try_lock(file):
            return False
        path.unlink()
        return True
