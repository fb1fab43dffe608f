"""The workspace of the fused backward pass: the keys' kernel fills a device, by simulation."""

from __future__ import annotations

import pytest

from benchmarks.static import (
    CAPABILITY,
    MULTIPROCESSORS,
    programs_of_keys,
    runs,
    steps_of_columns,
    utilization,
    workspace_of_run,
)
from pretrain.kernels.triton.tiling import built_in_tiles
from pretrain.kernels.triton.workspace import FILLING_PROGRAMS, WORKSPACE_BYTES, Chunk, chunks_of

SLOTS = MULTIPROCESSORS * 2  # programs on each (test_compiled_kernels)
LEAST_UTILIZATION = 0.85
RUNS = runs()
FILLING_MODELS = ("xl_modern_1b", "xl_modern_3b", "xl_modern_7b")  # with a single lane
LANES = (1, 2, 4, 7, 8, 16)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", RUNS)
def test_the_kernel_of_the_keys_keeps_an_h100_busy(name, lanes):
    run = RUNS[name]
    model, queries = run.model, run.data.segment_length
    workspace, group_heads = workspace_of_run(run, lanes), model.num_heads // model.key_heads
    tile = built_in_tiles(model.head_width, CAPABILITY).key_gradient
    steps = steps_of_columns(queries, queries + model.longest_memory, tile)
    launches = [
        programs_of_keys(workspace, steps, chunk.lanes * chunk.groups * group_heads)
        for chunk in workspace.chunks
    ]
    found = utilization(launches, SLOTS)
    programs = lanes * model.num_heads * len(steps)
    if programs < FILLING_PROGRAMS:  # too few even with one for each head: nothing else is divided
        assert (len(workspace.chunks), workspace.heads_per_program) == (1, 1)
        assert name not in FILLING_MODELS or found >= LEAST_UTILIZATION
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
