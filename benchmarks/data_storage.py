"""How long a training loop waits for shards that come from a slow store, with and without reading ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from benchmarks.data_measure import Row
from data_pipeline.corpora.cache_config import CacheConfig
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.manifest import Manifest, ShardInfo
from data_pipeline.corpora.remote_corpus import CachedShards
from data_pipeline.corpora.shard_cache import ShardCache
from data_pipeline.corpora.stores import store_at
from data_pipeline.files import sha256_of
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.prefetch import Prefetcher
from data_pipeline.shards.shards import write_shard

WAIT_GOAL = 0.01  # of the time
BLOCK_BYTES = 1 << 14


@dataclass(frozen=True)
class StorageSize:
    """A loop that takes `step_seconds` for a step, and a store that sends a shard in `shard_seconds`."""

    lanes: int = 4
    segment_length: int = 512
    shard_segments: int = 400  # so many steps a lane reads in one shard
    shards: int = 24
    steps: int = 1200
    step_seconds: float = 0.01
    shard_seconds: float = 1.0


def storage_rows(directory: Path, size: StorageSize) -> list[Row]:
    """The part of the time that the loop waits, after it has begun."""
    corpus = _corpus_of(directory / "train", size)
    shard_bytes = corpus.manifest.shards[0].size
    handler = partial(
        _SlowHandler, shard_bytes / size.shard_seconds, directory=str(directory / "train")
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        waits = {
            ahead: _waiting(corpus, _source(url, directory / f"cache-{ahead}", ahead), size)
            for ahead in (False, True)
        }
    finally:
        server.shutdown()
        server.server_close()
    what = f"a shard takes {size.shard_seconds:g} s to come and {size.shard_segments * size.step_seconds:g} s to read"
    return [
        Row(f"waiting for data without reading ahead, {what}", waits[False], 0, "of the time"),
        Row("waiting for data as it is", waits[True], WAIT_GOAL, "of the time"),
    ]


class _SlowHandler(SimpleHTTPRequestHandler):
    """Serves the files of a directory, each answer at so many bytes per second."""

    def __init__(self, bytes_per_second: float, *arguments, **options) -> None:  # type: ignore[no-untyped-def]
        self._bytes_per_second = bytes_per_second
        super().__init__(*arguments, **options)

    def copyfile(self, source, outputfile) -> None:  # type: ignore[no-untyped-def]
        while block := source.read(BLOCK_BYTES):
            outputfile.write(block)
            time.sleep(len(block) / self._bytes_per_second)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class _Unprepared(CachedShards):
    """What reading would be if shards were fetched when they are needed."""

    def prefetch(self, shards: Sequence[ShardInfo]) -> None:
        """Not listen."""


def _source(url: str, directory: Path, reads_ahead: bool) -> CachedShards:
    return (CachedShards if reads_ahead else _Unprepared)(
        store_at(url), ShardCache(CacheConfig(directory=directory))
    )


def _waiting(corpus: Corpus, source: CachedShards, size: StorageSize) -> float:
    stream = LaneStream(
        Corpus(corpus.directory, corpus.manifest, source),
        size.lanes,
        1,
        size.segment_length,
        range(size.lanes),
    )
    with Prefetcher(stream) as batches:
        next(batches)
        waited, began = batches.wait_seconds, time.perf_counter()
        for _ in range(size.steps):
            next(batches)
            time.sleep(size.step_seconds)
        return (batches.wait_seconds - waited) / (time.perf_counter() - began)


def _corpus_of(directory: Path, size: StorageSize) -> Corpus:
    directory.mkdir(parents=True)
    infos = []
    for number in range(size.shards):
        path, tokens = (
            directory / f"shard.{number:05d}.mds",
            np.full(size.segment_length, number, np.uint16),
        )
        write_shard(
            path,
            [(f"{place}", tokens) for place in range(size.shard_segments)],
            directory / "scratch",
        )
        count = size.segment_length * size.shard_segments
        infos.append(
            ShardInfo(
                path.name,
                size.shard_segments,
                count,
                len(tokens),
                path.stat().st_size,
                sha256_of(path),
                0,
                0,
            )
        )
    Manifest(dtype="uint16", tokenizer="", end_id=0, vocab_size=1 << 16, shards=tuple(infos)).write(
        directory
    )
    return Corpus.open(directory)
