"""How long a training loop waits for the shards of a slow store, with and without prefetching."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from benchmarks.data.reading import write_corpus
from benchmarks.measure import Measurement
from data_pipeline.config import CacheConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import ShardInfo
from data_pipeline.corpora.remote_corpus import CachedShards
from data_pipeline.corpora.shard_cache import ShardCache
from data_pipeline.corpora.stores import store_at
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.prefetcher import Prefetcher

WAIT_GOAL = 0.01  # fraction of the time that the loop may wait
BLOCK_BYTES = 1 << 14  # that the server sends between pauses
UNIT = "of the time"


@dataclass(frozen=True)
class StorageSize:
    """A loop with steps of `step_seconds`, and a store that sends a shard in `shard_seconds`."""

    lanes: int = 4
    segment_length: int = 512
    shard_segments: int = 400  # steps that a lane takes to read one shard
    shards: int = 24
    steps: int = 1200
    step_seconds: float = 0.01
    shard_seconds: float = 1.0


def storage_costs(directory: Path, size: StorageSize) -> Iterator[Measurement]:
    """Yield the fraction of the time that the loop waits after its first batch."""
    corpus = _corpus(directory / "train", size)
    rate = corpus.manifest.shards[0].size / size.shard_seconds
    handler = partial(_SlowHandler, rate, directory=str(corpus.directory))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    store = store_at(f"http://127.0.0.1:{server.server_address[1]}")
    read_seconds = size.shard_segments * size.step_seconds
    what = f"a shard takes {size.shard_seconds:g} s to fetch and {read_seconds:g} s to read"
    try:
        source = _NoPrefetch(store, ShardCache(CacheConfig(directory=directory / "cache-late")))
        wait = _waiting(corpus, source, size)
        yield Measurement(f"waiting for data without prefetching, {what}", [wait], UNIT)
        source = CachedShards(store, ShardCache(CacheConfig(directory=directory / "cache")))
        wait = _waiting(corpus, source, size)
        yield Measurement("waiting for data with prefetching", [wait], UNIT, at_most=WAIT_GOAL)
    finally:
        server.shutdown()
        server.server_close()


class _SlowHandler(SimpleHTTPRequestHandler):
    """Serves the files of a directory, each response at `bytes_per_second`."""

    def __init__(self, bytes_per_second: float, *arguments, **options) -> None:  # type: ignore[no-untyped-def]
        self._bytes_per_second = bytes_per_second
        super().__init__(*arguments, **options)

    def copyfile(self, source, outputfile) -> None:  # type: ignore[no-untyped-def]
        while block := source.read(BLOCK_BYTES):
            outputfile.write(block)
            time.sleep(len(block) / self._bytes_per_second)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _NoPrefetch(CachedShards):
    """Shards that are fetched only when they are needed."""

    def prefetch(self, shards: Sequence[ShardInfo]) -> None:
        """Ignore the request."""


def _waiting(corpus: Corpus, source: CachedShards, size: StorageSize) -> float:
    remote, lanes = Corpus(corpus.directory, corpus.manifest, source), range(size.lanes)
    stream = LaneStream(remote, size.lanes, 1, size.segment_length, lanes)
    with Prefetcher(stream) as batches:
        next(batches)
        waited, start = batches.wait_seconds, time.perf_counter()
        for _ in range(size.steps):
            next(batches)
            time.sleep(size.step_seconds)
        return (batches.wait_seconds - waited) / (time.perf_counter() - start)


def _corpus(directory: Path, size: StorageSize) -> Corpus:
    shards = (
        [
            (f"{segment}", np.full(size.segment_length, shard, np.uint16))
            for segment in range(size.shard_segments)
        ]
        for shard in range(size.shards)
    )
    write_corpus(directory, "mds", shards)
    return Corpus.open(directory)
