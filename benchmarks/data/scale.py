"""A simulated corpus of a terabyte and more: what its plan costs, and what a node downloads.

The manifest and the plan are real. Only the document lengths of a shard are drawn when needed.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure import Measurement, in_turns
from data_pipeline.corpora.manifest import Manifest, ShardInfo, read_manifest
from data_pipeline.lanes.lane_plan import LanePlan

MEMORY_GOAL_MB, EPOCH_GOAL_MS, SEEK_GOAL_MS, DOWNLOAD_GOAL = 64, 50, 5, 1.3
SEED = 1
SEEKS = 25
TOKENS_PER_TURN = 1 << 20  # that a lane reads at a time; downloads do not depend on it


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


def scale_costs(directory: Path, size: ScaleSize) -> Iterator[Measurement]:
    """Yield host memory, CPU time per epoch and per seek, and downloads over the least possible."""
    _write_manifest(directory, size)
    held, peak = _plan_memory(directory, size)
    cases = {"epoch": lambda: _epoch_seconds(size), "seek": lambda: _seek_seconds(size)}
    costs = in_turns(cases, rounds=5)
    milliseconds = {name: [1e3 * cost for cost in values] for name, values in costs.items()}
    corpus = (
        f"{size.shards:,} shards, {size.tokens:.0e} tokens, {size.documents:.0e} documents, "
        f"{size.lanes:,} lanes"
    )
    name = f"host memory of a rank for manifest and plan: {corpus}"
    yield Measurement(name, [held / 1e6], "MB", at_most=MEMORY_GOAL_MB)
    yield Measurement("the same while the manifest is being read", [peak / 1e6], "MB")
    name, unit = "order of a new epoch", "ms of CPU"
    yield Measurement(name, milliseconds["epoch"], unit, at_most=EPOCH_GOAL_MS)
    name = "seek to an offset in a lane"
    yield Measurement(name, milliseconds["seek"], unit, at_most=SEEK_GOAL_MS)
    lanes = size.ranks_of_node * size.lanes_of_rank
    name = f"downloads of a node of {lanes} lanes with a cache of {2 * lanes} shards"
    downloads = _downloads(size)
    yield Measurement(f"{name}, over the shards it reads", [downloads], at_most=DOWNLOAD_GOAL)


def _write_manifest(directory: Path, size: ScaleSize) -> None:
    tokens, digest = size.shard_tokens, "0123456789abcdef" * 4
    sizes = size.shard_documents, tokens, 20_000, 2 * tokens, digest, tokens, tokens, digest
    shards = tuple(ShardInfo(f"shard.{number:05d}.mds", *sizes) for number in range(size.shards))
    manifest = Manifest(
        dtype="uint16", tokenizer=digest, end_id=1, vocab_size=1 << 15, shards=shards
    )
    manifest.write(directory)


def _lengths_of(size: ScaleSize, unit: int) -> np.ndarray:
    """Return the tokens of each document of a shard, up to twice the mean."""
    weights = np.random.default_rng(unit).random(size.shard_documents) + 1e-9
    ends = np.round(np.cumsum(weights) * (size.shard_tokens / weights.sum())).astype(np.int64)
    return np.diff(ends, prepend=0)


def _plan(size: ScaleSize, document_lengths: Callable[[int], np.ndarray]) -> LanePlan:
    return LanePlan(np.full(size.shards, size.shard_tokens), size.lanes, SEED, document_lengths)


def _plan_memory(directory: Path, size: ScaleSize) -> tuple[int, int]:
    """Return the bytes that a rank holds for its lanes in the first two epochs, and the peak."""
    tracemalloc.start()
    manifest = read_manifest(directory)
    unit_tokens = [shard.tokens for shard in manifest.shards]
    plan = LanePlan(unit_tokens, size.lanes, SEED, lambda unit: _lengths_of(size, unit))
    walks = [plan.walk(lane, epoch) for lane in range(size.lanes_of_rank) for epoch in (0, 1)]
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del manifest, walks  # both had to live until here
    return held, peak


def _epoch_seconds(size: ScaleSize) -> float:
    plan = _plan(size, lambda unit: _lengths_of(size, unit))
    start = time.process_time()
    plan.epoch_order(3)
    return time.process_time() - start


def _seek_seconds(size: ScaleSize) -> float:
    """Return the CPU seconds of a seek, without drawing lengths, which a run does not do."""
    drawing = 0.0

    def lengths(unit: int) -> np.ndarray:
        nonlocal drawing
        start = time.process_time()
        drawn = _lengths_of(size, unit)
        drawing += time.process_time() - start
        return drawn

    plan = _plan(size, lengths)
    plan.epoch_order(0)
    generator = np.random.default_rng(0)
    start = time.process_time()
    for lane in generator.choice(size.lanes, min(SEEKS, size.lanes), replace=False).tolist():
        plan.walk(lane, 0, int(generator.integers(size.tokens // size.lanes // 2)))
    return (time.process_time() - start - drawing) / min(SEEKS, size.lanes)


class _NodeCache:
    """The shards that a node keeps; evicts the least recently used and counts downloads."""

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
    """Return downloads per shard that a node reads in an epoch, its lanes in lock step.

    Documents are few and long, because only shards are counted.
    """
    lanes = size.ranks_of_node * size.lanes_of_rank
    cache = _NodeCache(2 * lanes)

    def lengths(unit: int) -> np.ndarray:
        cache.use(unit)  # a shard's document lengths are in its headers
        return np.full(16, size.shard_tokens // 16) + (np.arange(16) < size.shard_tokens % 16)

    plans = [_plan(size, lengths) for _ in range(size.ranks_of_node)]
    walks = [plans[lane // size.lanes_of_rank].walk(lane) for lane in range(lanes)]
    read: set[int] = set()
    while any(walk.epoch == 0 and walk.position < walk.length for walk in walks):
        for walk in walks:
            for run in walk.take(min(TOKENS_PER_TURN, walk.length - walk.position)):
                cache.use(run.unit)
                read.add(run.unit)
    return cache.downloads / len(read)
