"""Which rank's file has which elements, who opens it, and who hashes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foundation.errors import CheckpointError
from foundation.records import Fields
from pretrain.checkpoint import marker
from pretrain.checkpoint.directory import rank_file
from pretrain.checkpoint.elastic_reader import FragmentReader
from pretrain.checkpoint.marker import Checkpoint, Progress, parts_in, share_of_rank
from pretrain.checkpoint.pieces import elements_of_rank, key_of, merged, parsed, report_of

SIZES = {"embedding": 64, "norm": 7, "query": 48, "bias": 1, "out": 96}
KINDS = ("weight", "exp_avg")
Slices = list[tuple[str, int, int]]  # parameter, start, end


def flat(rank: int, ranks: int) -> Slices:
    """As ZeRO 1 and 2: all parameters in a row, padded, one slice per rank."""
    length = -(-sum(SIZES.values()) // ranks)
    low, high, before, found = rank * length, (rank + 1) * length, 0, []
    for name, size in SIZES.items():
        start, end = max(low, before) - before, min(high, before + size) - before
        found += [(name, start, end)] if start < end else []
        before += size
    return found


def sliced(rank: int, ranks: int) -> Slices:
    """As ZeRO 3: every parameter in as many slices as ranks, the last ones short or empty."""
    bounds = {name: -(-size // ranks) for name, size in SIZES.items()}
    cut = ((name, rank * n, min(SIZES[name], (rank + 1) * n)) for name, n in bounds.items())
    return [each for each in cut if each[1] < each[2]]


LAYOUTS = {"flat": flat, "sliced": sliced}


def elements(slices: Slices) -> dict[str, int]:
    return {key_of(name, low, kind): high - low for name, low, high in slices for kind in KINDS}


def values(name: str, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(f"{name}{kind}".encode()))
    return torch.randn(SIZES[name], generator=generator)


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of four ranks."""
    directory, layout = tmp_path_factory.mktemp(request.param), LAYOUTS[request.param]
    for rank in range(4):
        tensors = {
            key_of(name, low, kind): values(name, kind)[low:high].clone()
            for name, low, high in layout(rank, 4)
            for kind in KINDS
        }
        save_file(tensors, directory / rank_file("engine", rank))
    pieces = merged([report_of(elements(layout(rank, 4)), rank) for rank in range(4)])
    return Checkpoint(directory, {"world_size": 4, "pieces": pieces, "layout": request.param})


def opened_by(found: Checkpoint, layout: str, rank: int, ranks: int) -> list[int]:
    """Read what a rank holds and compare it; returns the ranks whose files were opened."""
    with FragmentReader(found) as reader:
        for name, low, high in LAYOUTS[layout](rank, ranks):
            for kind in KINDS:
                view = torch.empty(high - low)
                reader.copy_into(view, name, low, kind)
                assert torch.equal(view, values(name, kind)[low:high])
        return reader.opened_ranks


def test_a_rank_of_the_same_world_opens_its_own_file_only(saved):
    layout = saved.index["layout"]
    assert [opened_by(saved, layout, rank, 4) for rank in range(4)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_world_and_layout_reads_every_element_from_the_files_that_have_it(saved, layout, ranks):
    opened = [opened_by(saved, layout, rank, ranks) for rank in range(ranks)]
    assert set().union(*opened) == {0, 1, 2, 3}
    if layout == saved.index["layout"] == "flat":
        assert max(map(len, opened)) <= -(-4 // ranks) + 1


def test_what_no_file_has_is_an_error_and_opens_nothing(saved):
    for name, start, kind in (("query", 40, "weight"), ("none", 0, "weight"), ("query", 0, "ema")):
        with FragmentReader(saved) as reader:
            with pytest.raises(CheckpointError, match=f"elements of {name} .*of another shape"):
                reader.copy_into(torch.empty(9), name, start, kind)
            assert kind == "weight" or not reader.opened_ranks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 4, 5, 300])
def test_the_index_says_for_each_rank_exactly_what_it_reported_in_few_runs(layout, ranks):
    reported = [elements(LAYOUTS[layout](rank, ranks)) for rank in range(ranks)]
    index = {"pieces": merged(report_of(each, rank) for rank, each in enumerate(reported))}
    pieces = parsed(Fields(index), ranks)
    assert [elements_of_rank(pieces, rank) for rank in range(ranks)] == reported
    assert {name: held.num_elements for name, held in pieces.items()} == SIZES
    assert max(len(held.runs) for held in pieces.values()) <= 3, "whatever the number of ranks"


def index_of(sizes: Iterator[int], ranks: int, node_ranks: int = 1) -> dict[str, Any]:
    """Files and ranks of a checkpoint: one of lane memories for every `node_ranks`."""
    files: dict[str, list[dict[str, Any]]] = {}
    reports = []
    for rank in range(ranks):
        state = rank_file("state", rank - rank % node_ranks)
        for name in (rank_file("engine", rank), state):
            files.setdefault(name, []).append({"bytes": next(sizes), "sha256": f"{name} {rank}"})
        reports.append({"state": state})
    return {"files": files, "ranks": reports}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("saved_by", [1, 2, 5, 64])
@pytest.mark.parametrize("node_ranks", [1, 4])
def test_each_byte_is_hashed_by_one_rank_and_no_rank_hashes_much_more_than_its_part(
    saved_by, world_size, node_ranks
):
    generator = random.Random(saved_by * world_size)
    drawn = iter([generator.choice([0, 1, 50, 900, 1000]) for _ in range(2 * saved_by)])
    index = index_of(drawn, saved_by, node_ranks)
    parts = parts_in(index)
    found = [share_of_rank(parts, rank, world_size) for rank in range(world_size)]
    hashed = sorted(part for share in found for part in share)
    for name, entries in index["files"].items():
        own = [part for part in hashed if part.name == name]
        assert [part.bytes for part in own] == [entry["bytes"] for entry in entries]
        assert [part.sha256 for part in own] == [entry["sha256"] for entry in entries]
        assert [part.start for part in own] == [
            sum(p.bytes for p in own[:n]) for n in range(len(own))
        ]
    assert len(hashed) == 2 * saved_by
    sizes = [sum(part.bytes for part in share) for share in found]
    assert max(sizes) <= sum(sizes) / world_size + 1000, "a share, and at most one part more"


def test_ranks_of_the_same_world_hash_the_parts_that_they_will_read():
    parts = parts_in(index_of(iter([800, 200] * 16), 16, node_ranks=8))
    for rank in range(16):
        engine, state = share_of_rank(parts, rank, 16)
        assert (engine.name, engine.engine_rank) == (rank_file("engine", rank), rank)
        assert (state.name, state.start) == (rank_file("state", rank // 8 * 8), rank % 8 * 200)


def test_progress_is_a_line_every_few_seconds_on_one_rank(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(marker.time, "monotonic", lambda: now[0])
    shown, silent = (Progress(7, 8 << 30, 4, 2 << 30, is_shown) for is_shown in (True, False))
    caplog.set_level("INFO")
    for _ in range(10):
        now[0] += 4.0
        shown.add(1 << 27)
        silent.add(1 << 27)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "verifying step 7: 19% of 8.0 GiB by 4 ranks, about 52 s left"
    assert len(lines) == 3


def test_a_rank_may_hold_nothing():
    reports = [report_of({}, 0), report_of({"w|0|weight": 3}, 1)]
    pieces = parsed(Fields({"pieces": merged(reports)}), 2)
    assert elements_of_rank(pieces, 0) == {}
    assert elements_of_rank(pieces, 1) == {"w|0|weight": 3}
