"""The table of tiles beside the fused kernels: used where it fits, else refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.tiles import write_table
from foundation.errors import ConfigError
from foundation.files import read_json, write_json
from pretrain.kernels.triton import tiling
from pretrain.kernels.triton.tiling import Tile, built_in_tiles, table_name, tiles_for

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
    ("changed", "reason"),
    [
        ({"kernels": "0123456789ab"}, "it is for kernels 0123456789ab, these are "),
        ({"format": 2}, "format is 2, expected an integer from 1 to 1"),
        ({"tiles": []}, "it is for compute capability no device, found 9.0"),
        ({"tiles": [{**FASTER, "capability": [8, 0]}]}, "capability 8.0, found 9.0"),
        ({"tiles": [{**FASTER, "kernel": "backward"}]}, "kernel is 'backward', expected forward"),
        ({"tiles": [{**FASTER, "warps": 3}]}, "no kernel takes Tile(rows=64, columns=32, warps=3"),
        ({"tiles": [{**FASTER, "columns": 1 << 30}]}, "expected an integer from 16 to 256"),
        ({"tiles": {}}, "tiles is {}, expected a list"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_one_line(
    table: Path, changed: dict[str, Any], reason: str
) -> None:
    write_json(table, read_json(table) | changed)
    with pytest.raises(ConfigError) as refused:
        tiles_for(128, H200)
    text = str(refused.value)
    assert text.startswith(f"{table} cannot be used: ")
    assert reason in text
    assert "\n" not in text


def test_a_table_that_cannot_be_read_is_refused(table: Path) -> None:
    table.write_text("{")
    with pytest.raises(ConfigError, match=r"tiles\.json cannot be used: .*; remove it"):
        tiles_for(128, H200)
