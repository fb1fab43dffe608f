"""The workspace of the fused backward pass: the keys' kernel fills a device, by simulation."""

from __future__ import annotations

import functools
import heapq
from pathlib import Path

import pytest

from foundation.settings import load_config
from pretrain.config.run import RunConfig
from pretrain.kernels.triton.tiling import Tile, built_in_tiles
from pretrain.kernels.triton.workspace import (
    FILLING_PROGRAMS,
    WORKSPACE_BYTES,
    Chunk,
    Workspace,
    chunks_of,
    workspace_of,
)

SLOTS = 132 * 2  # multiprocessors of an H100 or H200, programs on each (test_compiled_kernels)
LEAST_UTILIZATION = 0.85
MODEL_FILES = Path(__file__).parents[3] / "configs" / "models"
MODELS = sorted(path.stem for path in MODEL_FILES.glob("*.yaml"))
FILLING_MODELS = ("xl_modern_1b", "xl_modern_3b", "xl_modern_7b")  # with a single lane
LANES = range(1, 17)


@functools.cache
def run_of(model: str) -> RunConfig:
    return load_config(RunConfig, MODEL_FILES / f"{model}.yaml")


def steps_of_tiles(queries: int, keys: int, tile: Tile) -> list[int]:
    """Return the tiles of queries that see each tile of keys."""
    firsts = (max(0, j0 - (keys - queries)) // tile.rows for j0 in range(0, keys, tile.columns))
    return [-(-queries // tile.rows) - first for first in firsts]


def time_of(durations: list[int]) -> int:
    """Return when the last program ends if each starts in the first slot that is free."""
    free = [0] * SLOTS
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def utilization(workspace: Workspace, steps: list[int], group_heads: int) -> float:
    """Return the part of the slots' time that the programs of all launches use."""
    work = passed = 0
    heads = workspace.heads_per_program
    for chunk in workspace.chunks:
        parts = chunk.lanes * chunk.groups * group_heads // heads
        durations = [heads * each for each in steps for _ in range(parts)]  # as the kernel orders
        work += sum(durations)
        passed += time_of(durations)
    return work / (SLOTS * passed)


def workspace_of_run(run: RunConfig, lanes: int) -> tuple[Workspace, list[int]]:
    """Return a layer's workspace, and the steps of its programs for each head."""
    model, queries = run.model, run.data.segment_length
    keys, tiles = queries + model.longest_memory, built_in_tiles(model.head_width, (9, 0))
    workspace = workspace_of(
        lanes=lanes,
        queries=queries,
        keys=keys,
        heads=model.num_heads,
        groups=model.key_heads,
        head_width=model.head_width,
        tiles=tiles,
        element_bytes=2,
    )
    return workspace, steps_of_tiles(queries, keys, tiles.key_gradient)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("model", MODELS)
def test_the_kernel_of_the_keys_keeps_an_h100_busy(model, lanes):
    run = run_of(model)
    group_heads = run.model.num_heads // run.model.key_heads
    workspace, steps = workspace_of_run(run, lanes)
    found = utilization(workspace, steps, group_heads)
    programs = lanes * run.model.num_heads * len(steps)
    if programs < FILLING_PROGRAMS:  # too few even with one for each head: nothing else is divided
        assert (len(workspace.chunks), workspace.heads_per_program) == (1, 1)
        assert model not in FILLING_MODELS or found >= LEAST_UTILIZATION
    else:
        assert found >= LEAST_UTILIZATION
    assert workspace.num_bytes(2) <= WORKSPACE_BYTES


@pytest.mark.parametrize(
    ("fitting", "filling", "expected"),
    [
        (100, 100, [Chunk(0, 3, 0, 4)]),
        (11, 100, [Chunk(0, 1, 0, 4), Chunk(1, 2, 0, 4)]),
        (100, 4, [Chunk(lane, 1, 0, 4) for lane in range(3)]),
        (100, 6, [Chunk(0, 3, 0, 4)]),
        (3, 100, [Chunk(lane, 1, start, 2) for lane in range(3) for start in (0, 2)]),
        (100, 2, [Chunk(lane, 1, start, 2) for lane in range(3) for start in (0, 2)]),
        (1, 1, [Chunk(lane, 1, group, 1) for lane in range(3) for group in range(4)]),
    ],
)
def test_chunks_fill_the_device_in_equal_parts_of_lanes_or_of_the_groups_of_one(
    fitting, filling, expected
):
    assert chunks_of(num_lanes=3, num_groups=4, fitting=fitting, filling=filling) == expected
