"""What a start costs a rank that reads a corpus of many shards, and a node that caches them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.costs import Cost, Row
from benchmarks.scale.instruments import counted_files
from data_pipeline.config import CacheConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import MANIFEST_NAME, read_manifest
from data_pipeline.corpora.remote_corpus import ShardCache
from data_pipeline.corpora.stores import store_at
from data_pipeline.lanes.lane_stream import LaneStream
from foundation.files import SETTLED_NS
from tests.helpers.corpora import write_numbered_corpus
from tests.helpers.stores import FileServer

SHARDS = (50, 150, 450)
DOCUMENTS = [1000, 2000, 1500]  # tokens of a shard's documents
SHARDS_AT_RANKS = (1600, 12_500, 100_000)  # 15T tokens in shards of 300 MB, at 4,096 ranks
SHARDS_OF_LANE = 25
SEGMENT = 8
FIRST_BATCH_SECONDS = 10.0
MOST_SHARDS_OPENED = 2  # the lane's first, and the one in which it starts if that is another
CACHED = (100, 1000, 10_000)
FETCHED = 20


def corpus_costs(directory: Path) -> Iterator[Row]:
    """Yield the costs of the first batch, and of space in the cache."""
    seconds, shards_opened, lengths_opened = {}, {}, {}
    for shards in SHARDS:
        split = directory / f"{shards}" / "train"
        write_numbered_corpus(split, [DOCUMENTS] * shards)
        os.utime(split / MANIFEST_NAME)  # else this process remembers it
        time.sleep(2e-9 * SETTLED_NS)  # else it is parsed whenever it is read
        with (
            counted_files(split, ".mds") as of_shards,
            counted_files(split, ".lengths") as of_lengths,
        ):
            seconds[shards] = first_batch_seconds(split, shards)
        shards_opened[shards], lengths_opened[shards] = of_shards["opened"], of_lengths["opened"]
    yield Cost(
        name="corpus: a rank's CPU time to the first batch of one lane", unit="s", of="shards",
        measured=seconds, targets=SHARDS_AT_RANKS, at_most=FIRST_BATCH_SECONDS,
    )  # fmt: skip
    yield Cost(
        name="corpus: shards that a rank opens for it", of="shards", measured=shards_opened,
        targets=SHARDS_AT_RANKS, at_most=MOST_SHARDS_OPENED,
    )  # fmt: skip
    yield Cost(
        name="corpus: files of lengths that a rank opens for it", of="shards",
        measured=lengths_opened, targets=SHARDS_AT_RANKS,
    )  # fmt: skip
    source = directory / f"{SHARDS[0]}" / "train"
    yield Cost(
        name="cache: CPU time to fetch a small shard", unit="ms", of="cached shards",
        measured={count: fetch_ms(directory / f"cache-{count}", source, count) for count in CACHED},
        targets=CACHED,
    )  # fmt: skip


def first_batch_seconds(split: Path, shards: int) -> float:
    """Return the CPU seconds from opening the corpus to the first batch."""
    start = time.process_time()
    corpus, lanes = Corpus.open(split), shards // SHARDS_OF_LANE
    next(LaneStream(corpus, lanes, 1, SEGMENT, range(1)))
    return time.process_time() - start


def fetch_ms(directory: Path, source: Path, cached: int) -> float:
    """Return the CPU time of fetching a shard into a cache that has so many, but for its first."""
    cache = ShardCache(CacheConfig(directory=directory, gib=10.0))
    for number in range(cached):
        (directory / "shards" / hashlib.sha256(b"%d" % number).hexdigest()).write_bytes(b"x")
    first, *others = read_manifest(source).shards[: FETCHED + 1]
    with FileServer(source) as server:
        store = store_at(server.url)
        cache.open(store, first).close()
        start = time.process_time()
        for info in others:
            cache.open(store, info).close()
        return 1e3 * (time.process_time() - start) / len(others)
