"""A corpus of a terabyte and more, simulated: what its plan takes, and how much a node downloads.

The manifest and the plan are real; only the lengths of the documents inside a shard are made up when asked for.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.data_measure import Row, medians
from data_pipeline.corpora.manifest import Manifest, ShardInfo, read_manifest
from data_pipeline.lanes.lane_plan import LanePlan

MEMORY_GOAL_MB, EPOCH_GOAL_MS, SEEK_GOAL_MS, DOWNLOAD_GOAL = 64, 50, 5, 1.3
SEED = 1
SEEKS = 25
TOKENS_AT_ONCE = 1 << 20  # in the simulation of downloads; what is downloaded does not depend on it


@dataclass(frozen=True)
class ScaleSize:
    """The corpus and the cluster."""

    shards: int = 61_000
    tokens: int = 10**12
    documents: int = 10**9
    lanes: int = 4096
    ranks_of_node: int = 8
    lanes_of_rank: int = 8

    @property
    def shard_tokens(self) -> int:
        return self.tokens // self.shards

    @property
    def shard_documents(self) -> int:
        return self.documents // self.shards


def scale_rows(directory: Path, size: ScaleSize) -> list[Row]:
    """Memory, time per epoch, time per seek, and downloads over the least possible."""
    _write_manifest(directory, size)
    memory, peak = _plan_memory(directory, size)
    costs = medians(
        {"epoch": lambda: _epoch_seconds(size), "seek": lambda: _seek_seconds(size)}, rounds=5
    )
    what = f"{size.shards:,} shards, {size.tokens:.0e} tokens, {size.documents:.0e} documents, {size.lanes:,} lanes: "
    lanes = size.ranks_of_node * size.lanes_of_rank
    return [
        Row(f"{what}memory of a rank for manifest and plan", memory / 1e6, MEMORY_GOAL_MB, "MB"),
        Row("the same while the manifest is being read", peak / 1e6, 0, "MB"),
        Row("order of a new epoch", 1e3 * costs["epoch"], EPOCH_GOAL_MS, "ms of CPU"),
        Row("seek to a place in a lane", 1e3 * costs["seek"], SEEK_GOAL_MS, "ms of CPU"),
        Row(
            f"downloads of a node of {lanes} lanes with a cache of {2 * lanes} shards, over the shards it reads",
            _downloads(size),
            DOWNLOAD_GOAL,
            "x",
        ),
    ]


def _write_manifest(directory: Path, size: ScaleSize) -> None:
    tokens, digest = size.shard_tokens, "0123456789abcdef" * 4
    shards = tuple(
        ShardInfo(
            f"shard.{number:05d}.mds",
            size.shard_documents,
            tokens,
            20_000,
            2 * tokens,
            digest,
            tokens,
            tokens,
        )
        for number in range(size.shards)
    )
    Manifest(dtype="uint16", tokenizer=digest, end_id=1, vocab_size=1 << 15, shards=shards).write(
        directory
    )


def _lengths_of(size: ScaleSize, unit: int) -> np.ndarray:
    """Tokens of each document of a shard, of up to twice the mean length."""
    weights = np.random.default_rng(unit).random(size.shard_documents) + 1e-9
    ends = np.round(np.cumsum(weights) * (size.shard_tokens / weights.sum())).astype(np.int64)
    return np.diff(ends, prepend=0)


def _plan(size: ScaleSize, document_lengths: Callable[[int], np.ndarray]) -> LanePlan:
    return LanePlan(np.full(size.shards, size.shard_tokens), size.lanes, SEED, document_lengths)


def _plan_memory(directory: Path, size: ScaleSize) -> tuple[int, int]:
    """Bytes held by a rank whose lanes stand in the first epoch and its neighbours, and the most there ever were."""
    tracemalloc.start()
    manifest = read_manifest(directory)
    unit_tokens = [shard.tokens for shard in manifest.shards]
    plan = LanePlan(unit_tokens, size.lanes, SEED, lambda unit: _lengths_of(size, unit))
    walks = [plan.walk(lane, epoch) for lane in range(size.lanes_of_rank) for epoch in (0, 1)]
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert walks
    assert manifest.shards
    return held, peak


def _epoch_seconds(size: ScaleSize) -> float:
    plan = _plan(size, lambda unit: _lengths_of(size, unit))
    begin = time.process_time()
    plan.epoch_order(3)
    return time.process_time() - begin


def _seek_seconds(size: ScaleSize) -> float:
    """Without the time in which lengths are made up: a shard's are read from its headers in a run."""
    made_up = 0.0

    def lengths(unit: int) -> np.ndarray:
        nonlocal made_up
        begin = time.process_time()
        found = _lengths_of(size, unit)
        made_up += time.process_time() - begin
        return found

    plan = _plan(size, lengths)
    plan.epoch_order(0)
    generator = np.random.default_rng(0)
    begin = time.process_time()
    for lane in generator.choice(size.lanes, min(SEEKS, size.lanes), replace=False).tolist():
        plan.walk(lane, 0, int(generator.integers(size.tokens // size.lanes // 2)))
    return (time.process_time() - begin - made_up) / min(SEEKS, size.lanes)


class _NodeCache:
    """The shards of a node, those last used longest ago evicted first; counts downloads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: OrderedDict[int, None] = OrderedDict()
        self.downloads = 0

    def use(self, unit: int) -> None:
        self.downloads += unit not in self._held
        self._held[unit] = None
        self._held.move_to_end(unit)
        if len(self._held) > self._size:
            self._held.popitem(last=False)


def _downloads(size: ScaleSize) -> float:
    """An epoch of all lanes of a node in lock step. Documents are few and long: only shards are counted."""
    lanes = size.ranks_of_node * size.lanes_of_rank
    cache = _NodeCache(2 * lanes)

    def lengths(unit: int) -> np.ndarray:
        cache.use(unit)  # a shard's headers are in the shard
        return np.full(16, size.shard_tokens // 16) + (np.arange(16) < size.shard_tokens % 16)

    plans = [_plan(size, lengths) for _ in range(size.ranks_of_node)]
    walks = [plans[lane // size.lanes_of_rank].walk(lane) for lane in range(lanes)]
    read: set[int] = set()
    while any(walk.epoch == 0 and walk.position < walk.length for walk in walks):
        for walk in walks:
            for run in walk.take(min(TOKENS_AT_ONCE, walk.length - walk.position)):
                cache.use(run.unit)
                read.add(run.unit)
    return cache.downloads / len(read)
