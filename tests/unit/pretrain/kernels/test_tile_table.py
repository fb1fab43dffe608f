"""The table of tiles beside the fused kernels: used where it fits, else refused in one line."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.tiles import write_table
from benchmarks.static import (
    CAPABILITY,
    MULTIPROCESSORS,
    programs_of_keys,
    runs,
    steps_of_columns,
    utilization,
    workspace_of_run,
)
from foundation.errors import ConfigError
from foundation.files import read_json, write_json
from pretrain.kernels.triton import tiling
from pretrain.kernels.triton.tiling import (
    FILLING_PROGRAMS,
    WORKSPACE_BYTES,
    Chunk,
    Tile,
    built_in_tiles,
    lane_chunks,
    table_name,
    tiles_for,
)

H200 = (9, 0)
ROW = {"capability": [9, 0], "head_width": 128, "kernel": "forward", "warps": 4, "stages": 3}
FORWARD = {**ROW, "rows": 64, "columns": 64, "seconds": 2.0}
FASTER = {**FORWARD, "columns": 32, "seconds": 1.0}
KEYS = {**ROW, "kernel": "key_gradient", "rows": 64, "columns": 64, "seconds": 1.0}


@pytest.fixture
def table(tmp_path: Path, monkeypatch) -> Path:
    """The path of a table, which the search has written."""
    path = tmp_path / "tiles.json"
    monkeypatch.setattr(tiling, "TABLE", path)
    write_table(path, [FORWARD, FASTER, KEYS, {**FORWARD, "refused": "no"}])
    return path


def test_what_the_search_wrote_is_used_for_the_widths_it_serves(table: Path) -> None:
    found = {"forward": Tile(64, 32, 4, 3), "key_gradient": Tile(64, 64, 4, 3)}
    for width in (72, 128):
        assert tiles_for(width, H200) == replace(built_in_tiles(width, H200), **found)
    for width in (64, 100):  # of another width, and with rows that are no multiples of 16 bytes
        assert tiles_for(width, H200) == built_in_tiles(width, H200)


def test_without_a_table_the_built_in_tiles_are_used(table: Path) -> None:
    named = table_name()
    table.unlink()
    assert tiles_for(128, H200) == built_in_tiles(128, H200)
    assert (len(named), table_name()) == (12, "built in")


def test_the_kernels_have_no_table_unless_a_user_puts_it_there() -> None:
    assert not tiling.TABLE.exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"kernels": "0123456789ab"},
        {"format": 2},
        {"tiles": []},
        {"tiles": [{**FASTER, "capability": [8, 0]}]},
        {"tiles": [{**FASTER, "kernel": "backward"}]},
        {"tiles": [{**FASTER, "warps": 3}]},
        {"tiles": [{**FASTER, "columns": 1 << 30}]},
        {"tiles": {}},
        None,
    ],
)
def test_a_table_that_does_not_fit_or_cannot_be_read_is_refused_in_one_line(table, changed):
    write_json(table, read_json(table) | changed) if changed else table.write_text("{")
    with pytest.raises(ConfigError) as refused:
        tiles_for(128, H200)
    assert str(refused.value).startswith(f"{table} ")
    assert "\n" not in str(refused.value)


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
def test_chunks_fill_the_device_in_equal_parts(fitting, filling, expected):
    assert lane_chunks(num_lanes=3, num_groups=4, fitting=fitting, filling=filling) == expected
