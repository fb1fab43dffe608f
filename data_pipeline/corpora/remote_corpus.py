"""A corpus named by a URL, read like a local one: lanes fetch shards into the node's cache.

CACHE/corpora/ID/remote.json          the URL
CACHE/corpora/ID/copied.json          the versions of the store's manifests that were copied
CACHE/corpora/ID/tokenizer/           a copy of the store's
CACHE/corpora/ID/SPLIT/manifest.json  a copy of the store's; the shards are in shard_cache.py
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.fetch import NotFetchedError, fetch_manifest, fetch_tokenizer
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    REMOTE_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    ShardInfo,
    read_manifest,
)
from data_pipeline.corpora.shard_cache import ShardCache
from data_pipeline.corpora.stores import Store, store_at
from data_pipeline.corpora.web_requests import RetryPolicy
from data_pipeline.shards.shards import ShardReader
from foundation.errors import DataError
from foundation.files import read_json, read_value, write_json
from foundation.locks import exclusive_lock
from foundation.ownership import private_directory
from foundation.paths import url_of

CORPORA, COPIED_NAME = "corpora", "copied.json"
OPEN_SECONDS = 600.0  # longest wait for another process that fetches manifests
PREFETCH_THREADS = 4


def local_corpus_directory(
    path: Path, config: CacheConfig, retry_policy: RetryPolicy | None = None
) -> Path:
    """Return the directory to read the corpus from: `path`, or this node's copy of a URL.

    The directory then has manifests and tokenizer as the store has them now. A manifest is fetched
    only if the store has another version of it.
    """
    if (url := url_of(path)) is None:
        return path
    retry_policy = retry_policy or RetryPolicy()
    store = store_at(url, retry_policy)
    root = private_directory(config.path.absolute())
    private_directory(root / CORPORA)
    identity = hashlib.sha256(store.url.encode()).hexdigest()[:16]
    directory = private_directory(root / CORPORA / identity)
    asked = time.time_ns()
    # All ranks of the node call this at the same time; one of them fetches.
    with exclusive_lock(directory / ".lock", OPEN_SECONDS):
        write_json(directory / REMOTE_NAME, {"url": store.url})
        copied = _read_copied(directory)
        if not asked <= copied.compared_ns <= time.time_ns():
            write_json(
                directory / COPIED_NAME, asdict(_compare(url, directory, retry_policy, copied))
            )
    return directory


@dataclass(frozen=True)
class _Copied:
    """The versions of the store's manifests that a copy has, and when they were compared."""

    compared_ns: int = 0
    versions: dict[str, str] = field(default_factory=dict)  # split -> version, "" if not known


def _read_copied(directory: Path) -> _Copied:
    try:
        return read_value(_Copied, directory / COPIED_NAME)
    except (OSError, ValueError):
        return _Copied()


def _compare(url: str, directory: Path, policy: RetryPolicy, before: _Copied) -> _Copied:
    """Fetch the manifests, and the tokenizer, that differ from the store's; return the versions."""
    compared_ns, versions = time.time_ns(), {}
    for split in SPLITS:
        store = store_at(f"{url}/{split}", policy)
        # Ask before fetching: if the file changes in between, the next call fetches it.
        versions[split] = store.version(MANIFEST_NAME)
        try:
            manifest = None
            if versions[split] and versions[split] == before.versions.get(split):
                with contextlib.suppress(DataError):  # the copy is damaged
                    manifest = read_manifest(directory / split)
            manifest = manifest or fetch_manifest(store, directory / split)
        except NotFetchedError as error:
            if not error.is_absent or split == SPLITS[0]:
                raise
            # The corpus has no such split now: remove the copy of an earlier one.
            (directory / split / MANIFEST_NAME).unlink(missing_ok=True)
            continue
        if split == SPLITS[0]:
            tokenizers = store_at(f"{url}/{TOKENIZER_DIRECTORY}", policy)
            fetch_tokenizer(tokenizers, directory / TOKENIZER_DIRECTORY, manifest.tokenizer)
    return _Copied(compared_ns, versions)


def cached_shards(split: Path, config: CacheConfig) -> CachedShards | None:
    """Return the source of the shards of a split that `local_corpus_directory` made in this cache.

    None for a split elsewhere: files that come with a corpus must not choose a store or cache.
    """
    copy = split.absolute().parent
    if copy.parent != config.path.absolute() / CORPORA:
        return None
    path = private_directory(copy) / REMOTE_NAME
    try:
        url = str(read_json(path)["url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is corrupted ({error!r}); remove {copy} to fetch it again"
        ) from None
    return CachedShards(store_at(f"{url}/{split.name}"), ShardCache(config))


class CachedShards:
    """Source of the shards of a store, which are read through the node's cache."""

    keep_open = 2  # an open shard cannot be evicted, so more would fill the cache

    def __init__(self, store: Store, cache: ShardCache) -> None:
        self.location = store.url
        self.cache = cache
        self._store = store
        self._prefetcher = ShardPrefetcher(self._fetch)
        self._length_prefetcher = ShardPrefetcher(partial(cache.lengths, store))

    def open(self, info: ShardInfo, dtype: str) -> ShardReader:
        """Open a shard; waits for the store unless the cache has it."""
        file = self.cache.open(self._store, info)
        return ShardReader(Path(f"{self.location}/{info.path}"), dtype, file)

    def lengths(self, info: ShardInfo) -> np.ndarray:
        """Return the lengths of a shard's documents; waits for the store."""
        return self.cache.lengths(self._store, info)

    def prefetch_lengths(self, shards: Sequence[ShardInfo]) -> None:
        """Start to fetch lengths."""
        self._length_prefetcher.request(shards)

    def prefetch(self, shards: Sequence[ShardInfo]) -> None:
        """Start to fetch the shards that the cache does not have."""
        self._prefetcher.request(shards)

    def _fetch(self, info: ShardInfo) -> None:
        self.cache.fetch(self._store, info)
        self.cache.lengths(self._store, info)  # the lane's walk asks for them first

    def check_capacity(self, num_shards: int, largest: int) -> None:
        """Raise DataError unless the cache can hold that many of the largest shard."""
        self.cache.check_capacity(num_shards, largest)


class ShardPrefetcher:
    """Calls `fetch` in background threads for the requested shards, in the order of requests.

    Failures are ignored here: opening the shard tries again and reports the error.
    """

    def __init__(
        self, fetch: Callable[[ShardInfo], object], num_threads: int = PREFETCH_THREADS
    ) -> None:
        self._fetch = fetch
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._waiting: deque[ShardInfo] = deque()
        self._pending: set[str] = set()  # requested and not done
        self._running = 0

    def request(self, shards: Iterable[ShardInfo]) -> None:
        """Queue shards that are not pending, and return immediately."""
        with self._lock:
            for info in shards:
                if info.sha256 in self._pending:
                    continue
                self._pending.add(info.sha256)
                self._waiting.append(info)
                if self._running < self._num_threads:
                    self._running += 1
                    threading.Thread(target=self._work, name="shard-fetch", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                info = self._waiting.popleft()
            with contextlib.suppress(Exception):
                self._fetch(info)
            with self._lock:
                self._pending.discard(info.sha256)
