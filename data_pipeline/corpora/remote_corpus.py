"""A corpus named by a URL, read like one on this disk: shards are fetched into the node's cache as lanes near them.

CACHE/corpora/ID/remote.json          the URL, and the limit of the cache
CACHE/corpora/ID/tokenizer/           as the store has it
CACHE/corpora/ID/SPLIT/manifest.json  as the store has it; the shards are in CACHE/shards
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from data_pipeline.corpora.cache_config import CacheConfig
from data_pipeline.corpora.fetch import NotFetchedError, fetch_manifest, fetch_tokenizer
from data_pipeline.corpora.manifest import REMOTE_NAME, SPLITS, TOKENIZER_DIRECTORY, ShardInfo
from data_pipeline.corpora.read_ahead import ReadAhead
from data_pipeline.corpora.shard_cache import ShardCache
from data_pipeline.corpora.stores import RetryPolicy, Store, store_at
from data_pipeline.errors import DataError
from data_pipeline.file_lock import exclusive_lock
from data_pipeline.files import write_json
from data_pipeline.location import url_of
from data_pipeline.shards.shards import ShardReader

CORPORA = "corpora"
OPEN_SECONDS = 600.0


def local_corpus_directory(
    path: Path, config: CacheConfig, patience: RetryPolicy | None = None
) -> Path:
    """The directory to read the corpus at `path` from: itself, or this node's cache of the URL that it is.

    Manifests and tokenizer are there afterwards, as the store has them now.
    """
    if (url := url_of(path)) is None:
        return path
    patience = patience or RetryPolicy()
    store = store_at(url, patience)
    directory = (
        config.place.absolute() / CORPORA / hashlib.sha256(store.url.encode()).hexdigest()[:16]
    )
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with exclusive_lock(directory / ".lock", OPEN_SECONDS):
        write_json(directory / REMOTE_NAME, {"url": store.url, "cache_gib": config.gib})
        train, *others = SPLITS
        manifest = fetch_manifest(store_at(f"{url}/{train}", patience), directory / train)
        fetch_tokenizer(
            store_at(f"{url}/{TOKENIZER_DIRECTORY}", patience),
            directory / TOKENIZER_DIRECTORY,
            manifest.tokenizer,
        )
        for split in others:
            with _absent_is_fine():
                fetch_manifest(store_at(f"{url}/{split}", patience), directory / split)
    return directory


@contextlib.contextmanager
def _absent_is_fine():  # type: ignore[no-untyped-def]
    try:
        yield
    except NotFetchedError as error:
        if not error.is_final:
            raise


def cached_shards(split: Path) -> CachedShards:
    """Where the shards of a split that `local_corpus_directory` made come from."""
    path = split.parent / REMOTE_NAME
    try:
        tree = json.loads(path.read_bytes())
        url, gib = str(tree["url"]), float(tree["cache_gib"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error!r}); remove {split.parent}, it is fetched again"
        ) from None
    cache = ShardCache(CacheConfig(directory=split.parents[2], gib=gib))
    return CachedShards(store_at(f"{url}/{split.name}"), cache)


class CachedShards:
    """A source of shards: those of a store, by way of a cache."""

    keep_open = 2  # more would keep room from others

    def __init__(self, store: Store, cache: ShardCache) -> None:
        self.place = store.url
        self.cache = cache
        self._store = store
        self._read_ahead = ReadAhead(partial(cache.fetch, store))

    def open(self, info: ShardInfo, dtype: str) -> ShardReader:
        """Waits for the store unless the shard is there already."""
        return ShardReader(
            Path(f"{self.place}/{info.path}"), dtype, self.cache.open(self._store, info)
        )

    def prefetch(self, shards: Sequence[ShardInfo]) -> None:
        """Begin to fetch what is not there."""
        self._read_ahead.ask_for(shards)

    def check_room(self, num_shards: int, largest: int) -> None:
        """The cache must hold them."""
        self.cache.check_room(num_shards, largest)
