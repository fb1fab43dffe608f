"""Which rank's file has which elements, who opens it, and who hashes it."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save_file

from foundation.errors import CheckpointError
from foundation.records import Fields
from pretrain.checkpoint.directory import rank_file
from pretrain.checkpoint.elastic_reader import FragmentReader
from pretrain.checkpoint.marker import Checkpoint, share_of_rank
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
        save_file(tensors, directory / rank_file(rank))
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("saved_by", [1, 2, 5, 64])
def test_each_file_is_hashed_by_one_rank_and_no_rank_hashes_much_more_than_its_part(
    saved_by, world_size
):
    generator = random.Random(saved_by * world_size)
    sizes = [generator.choice([0, 1, 50, 900, 1000]) for _ in range(saved_by)]
    shares = [share_of_rank(sizes, rank, world_size) for rank in range(world_size)]
    assert [number for share in shares for number in share] == list(range(saved_by))
    largest = max(sum(sizes[number] for number in share) for share in shares)
    assert largest <= sum(sizes) / world_size + 1000, "a share, and at most one file more"
