"""Shards of remote corpora on this node's disk, in a size limit shared by all its processes.

CACHE/shards/SHA256        complete and checked; share-locked while a reader has it open
CACHE/incoming/SHA256.N    N bytes reserved by a download, whose process holds the shard's lock
CACHE/lengths/SHA256       the lengths of its documents, see below
CACHE/locks/000 ... fff    one lock per shard, by the first digits of its SHA-256
CACHE/room.lock            held while a process evicts and reserves, see below
CACHE/readers/SHA256.X     only without flock: a process that has the shard open, see locks.py

The cache removes nothing in these directories but what has such a name, and is a directory of this
user into which no other can write. Locks are released when their process
dies, so a reservation whose lock is free was left by a killed process. An open shard is never
evicted: the lock on the file itself, taken before the file gets its name, protects it. Without
flock its marks do, which processes make and look for while they hold room.lock.

The size limit of a directory of files that may be removed, shared by all processes of a node.

CACHE/FILES/NAME      a file; the time of its last access tells the last use
CACHE/FILES.space     bytes that count as used, and how much of FILES.oldest is done with
CACHE/FILES.oldest    the files that were used least recently when all were last listed

Making space reads two short files and looks at as many files as it removes. All are listed when
the used bytes are unknown, when FILES.oldest is done with, and when they do not suffice: once per
LISTED_SHARE of all files. What is killed, removed by hand or given up halfway leaves the used
bytes too high, never too low, and the next listing corrects them.

The lengths of the documents of remote shards, on this node's disk.

CACHE/lengths/SHA256        of the shard with that hash, as SHARD.lengths (lengths.py)

They come from the store if the manifest lists them, else from the shards that were read. Every
reading checks them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.fetch import fetch_lengths, fetch_shard
from data_pipeline.corpora.lengths import (
    LARGEST_LENGTH,
    InvalidLengths,
    lengths_bytes,
    lengths_content,
    read_lengths,
)
from data_pipeline.corpora.manifest import FileState, ShardInfo, file_state, mismatch_of
from data_pipeline.corpora.stores import Store
from foundation.errors import DataError
from foundation.files import atomic_write, fsync_directory, path_below, private_directory
from foundation.locks import (
    NoFileLocksError,
    exclusive_lock,
    held_lock,
    is_in_use,
    open_marked,
    open_shared,
    try_lock,
)

LISTED_SHARE = 4
FEWEST_LISTED = 64
_STATE = re.compile(rb"([0-9]{1,18}) ([0-9]{1,18})\n")
_ENTRY = re.compile(rb"([0-9]{1,20}) ([0-9]{1,18}) ([0-9a-f]{64})\n")
_FILE_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    size: int
    used_ns: int
    end: int = 0  # of its line in FILES.oldest


class CacheSpace:
    """At most `limit` bytes of files and of what `reserved` counts.

    `evict` removes a file and returns whether it could. Callers of one directory take turns, by a
    lock.
    """

    def __init__(
        self,
        files: Path,
        limit: int,
        evict: Callable[[Path], bool],
        reserved: Callable[[], int] = lambda: 0,
    ) -> None:
        self._files, self._limit, self._evict_file, self._reserved = files, limit, evict, reserved
        self._state = files.with_name(f"{files.name}.space")
        self._oldest = files.with_name(f"{files.name}.oldest")

    def make(self, size: int) -> bool:
        """Remove what was used least recently until `size` bytes fit.

        Whether they do; then they count as used.
        """
        used, done = self._read_state()
        if used is not None and used + size > self._limit:
            used, done = self._evict(self._listed(done), used, size, done)
        if used is None or used + size > self._limit:
            used, done = self._list_and_evict(size)
        fits = used + size <= self._limit
        with atomic_write(self._state, sync=False) as file:
            file.write(b"%d %d\n" % (used + size if fits else used, done))
        return fits

    def _list_and_evict(self, size: int) -> tuple[int, int]:
        found = sorted(self._entries(), key=lambda entry: entry.used_ns)
        used = sum(entry.size for entry in found) + self._reserved()
        candidates = iter(found)
        used, _ = self._evict(candidates, used, size, 0)
        count = max(FEWEST_LISTED, len(found) // LISTED_SHARE)
        with atomic_write(self._oldest, sync=False) as file:
            for entry in islice(candidates, count):
                file.write(b"%d %d %s\n" % (entry.used_ns, entry.size, entry.name.encode()))
        return used, 0

    def _evict(
        self, candidates: Iterator[_Entry], used: int, size: int, done: int
    ) -> tuple[int, int]:
        """Remove candidates until `size` bytes fit; return the used bytes and the last one's end.

        One that was used since it was listed stays, and so does one that is in use.
        """
        while used + size > self._limit:
            if (entry := next(candidates, None)) is None:
                break
            path, done = self._files / entry.name, entry.end
            try:
                if path.stat().st_atime_ns == entry.used_ns and self._evict_file(path):
                    used -= entry.size
            except FileNotFoundError:  # removed by hand
                continue
        return used, done

    def _read_state(self) -> tuple[int | None, int]:
        try:
            match = _STATE.fullmatch(self._state.read_bytes())
        except FileNotFoundError:
            match = None
        return (int(match[1]), int(match[2])) if match else (None, 0)

    def _listed(self, done: int) -> Iterator[_Entry]:
        """Yield what FILES.oldest lists after its first `done` bytes."""
        try:
            with open(self._oldest, "rb") as file:
                file.seek(done)
                while match := _ENTRY.fullmatch(file.readline()):
                    name = match[3].decode()
                    yield _Entry(name, int(match[2]), int(match[1]), file.tell())
        except FileNotFoundError:
            return

    def _entries(self) -> Iterator[_Entry]:
        with os.scandir(self._files) as entries:
            for entry in entries:
                if _FILE_NAME.fullmatch(entry.name):
                    status = entry.stat()
                    yield _Entry(entry.name, status.st_size, status.st_atime_ns)


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
        self._shards, self._incoming, self._locks, self._readers = (
            self.directory / name for name in ("shards", "incoming", "locks", "readers")
        )
        self._verified: dict[str, FileState] = {}  # as each shard was when it was checked
        private_directory(self.directory)
        for directory in (self._shards, self._incoming, self._locks, self._readers):
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
            file = self._open_in_use(path)
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
            file = self._open_in_use(arrived)
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

    def _open_in_use(self, path: Path) -> BinaryIO:
        """Open a shard that then is not evicted as long as it is open or mapped."""
        try:
            return open_shared(path)
        except NoFileLocksError:
            with self._room():
                return open_marked(path, self._readers)

    def _evict(self, path: Path) -> bool:
        """Remove a shard, unless a process has it open; whether it was removed."""
        with open(path, "rb") as file:
            try:
                is_free = try_lock(file)
            except NoFileLocksError:
                is_free = not is_in_use(self._readers, path.name)
            if is_free:
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
