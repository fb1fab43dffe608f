"""The file that each rank saves: written without the library, read by it, by slices and lanes."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from foundation.errors import CheckpointError
from foundation.files import content_of
from foundation.records import Fields
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.background_save import (
    HostBuffer,
    Pieces,
    RankFile,
    RankReports,
    Save,
    copy_to_host,
    decoded,
    encoded,
    layout_of,
)
from pretrain.checkpoint.destinations import BLOCK_BYTES, Disk, TensorFile, write_file
from pretrain.checkpoint.directory import rank_file
from pretrain.checkpoint.elastic_reader import FragmentReader, load_memory, restore_random_state
from pretrain.checkpoint.marker import Checkpoint, share_of_rank
from pretrain.checkpoint.pieces import elements_of_rank, key_of, merged, parsed, report_of
from pretrain.distributed.rounds import Worker
from pretrain.model.lane_state import LaneState, Memory, _shape
from pretrain.state import TrainState
from tests.helpers.checkpoints import index_of
from tests.helpers.models import TINY


def written(path: Path, tensors: Pieces) -> dict[str, object]:
    layout = layout_of(tensors)
    host = torch.full((layout.num_bytes + 100,), 0xAB, dtype=torch.uint8)  # used before
    copy_to_host(tensors, layout, host)
    body = host.numpy().data[: layout.num_bytes]
    return write_file(path, TensorFile(layout.header, body), lambda: None)


def test_the_library_reads_every_type_and_shape_bitwise(tmp_path):
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "bytes": [torch.arange(7, dtype=torch.uint8)],
        "half": [random(3, 5).to(torch.bfloat16)],
        "half.16": [random(3).to(torch.float16)],
        "documents": [torch.arange(-3, 3, dtype=torch.int32).view(2, 3)],
        "count": [torch.tensor([2**40])],
        "double": [random(1).double()],
        "odd|0|weight": [random(11)],
        "empty": [torch.empty(2, 0, 4)],
        "turned": [random(4, 6).t()],
    }
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"x" * 99_999)  # of a former try
    described = written(path, tensors)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, (tensor,) in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name
    assert described == vars(content_of(path))


def test_pieces_become_one_tensor(tmp_path):
    slots = [torch.arange(12.0).view(2, 3, 2), torch.arange(12.0, 18.0).view(1, 3, 2)]
    written(tmp_path / "file", {"memory": slots})
    with safe_open(tmp_path / "file", framework="pt") as handle:
        assert torch.equal(handle.get_slice("memory")[1:3], torch.cat(slots)[1:3])


def test_writing_can_be_canceled_between_blocks(tmp_path):
    calls = []

    def give_up_at_the_third() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    body = bytes(3 * BLOCK_BYTES)
    with pytest.raises(InterruptedError):
        write_file(tmp_path / "file", TensorFile(b"header", body), give_up_at_the_third)
    assert (tmp_path / "file").stat().st_size < len(body)


PIECES = {"w": {"kinds": ["weight"], "pieces": [[0, 100]]}}
LANES = (2, 1, 0, 3, 1)  # of each rank
FIRST = [sum(LANES[:rank]) for rank in range(len(LANES))]


def memory_of(rank: int) -> Memory:
    """The memory of a rank's lanes, of three rows."""
    generator = torch.Generator().manual_seed(rank)
    return tuple(
        torch.randint(1, 9999, _shape(part, LANES[rank], 3), generator=generator).float()
        for part in LaneState(TINY).parts
    )


def saves_of(root: Path) -> list[Save]:
    """The ranks' parts of a save, each with a connection of its own; nothing is started."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    disk = Disk(root, "attempt")
    disk.prepare(7, 0)
    saves = []
    for rank, num_lanes in enumerate(LANES):
        own = TCPStore("127.0.0.1", store.port, wait_for_workers=False) if rank else store
        fragments = {key_of("w", 4 * rank, "weight"): [torch.full((4,), float(rank))]}
        memories: list[Memory | None] = [memory_of(rank)] if num_lanes else []
        torch.manual_seed(rank)
        file = RankFile.of(fragments, TrainState(step=7, memories=memories), LaneState(TINY))
        report = {"first_lane": FIRST[rank], "num_lanes": num_lanes, "cursor": None}
        reports = RankReports("a/1", rank, len(LANES), own)
        buffer = HostBuffer(torch.device("cpu"))
        saves.append(Save(disk, file, index_of(7, len(LANES)), report, reports, buffer))
    return saves


def start(*saves: Save) -> None:
    for save in saves:
        worker = Worker("save")
        worker.add(save.run)
        worker.end()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> marker.Checkpoint:
    root = tmp_path_factory.mktemp("root")
    saves = saves_of(root)
    start(*reversed(saves))
    assert [save.wait() for save in saves] == [None] * len(saves)
    return marker.verify(files.step_directory(root, 7))


def test_any_lanes_are_read_from_the_files_of_the_ranks_that_had_them(saved):
    lane_state = LaneState(TINY)
    with_lanes = [lane_state.named(memory_of(rank)) for rank in range(len(LANES)) if LANES[rank]]
    whole = {name: torch.cat([each[name] for each in with_lanes]) for name in with_lanes[0]}
    for lanes in (range(7), range(2, 3), range(1, 6)):
        loaded = load_memory(saved, lanes)
        assert loaded is not None
        assert loaded.keys() == whole.keys()
        for name, part in whole.items():
            assert torch.equal(loaded[name], part[lanes.start : lanes.stop]), name


def test_each_rank_finds_its_own_random_state(saved):
    for rank in range(len(LANES)):
        torch.manual_seed(rank)
        expected = torch.get_rng_state()
        torch.manual_seed(99)
        restore_random_state(saved, rank)
        assert torch.equal(torch.get_rng_state(), expected)


def test_a_rank_that_fails_ends_the_save_on_rank_0_which_names_it(tmp_path):
    saves = saves_of(tmp_path)
    (tmp_path / ".partial-00000007-attempt" / files.rank_file(3)).mkdir()
    start(*saves)
    assert [save.wait() for save in saves[1:3]] == [None, None]
    problem = saves[0].wait()
    assert problem is not None
    assert problem.may_pass
    assert problem.text.startswith("rank 3: ")
    assert "rank-00003.safetensors: " in problem.text
    assert files.steps_on_disk(tmp_path) == []


def test_without_the_file_of_one_rank_nothing_is_published(tmp_path):
    saves = saves_of(tmp_path)
    start(*saves[:3], saves[4])
    assert saves[4].wait() is None, "it waits for no other rank"
    for save in (*saves[:3], saves[4]):
        save.cancel()
    assert not saves[0].is_published
    assert files.steps_on_disk(tmp_path) == []


def reports_of(num_ranks: int, name: str, store: TCPStore) -> list[RankReports]:
    """Those of each rank, over its own connection."""
    own = [TCPStore("127.0.0.1", store.port, wait_for_workers=False) for _ in range(1, num_ranks)]
    return [RankReports(name, rank, num_ranks, each) for rank, each in enumerate([store, *own])]


def test_rank_0_gets_every_report_in_rank_order_and_none_of_a_save_that_was_given_up():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for reports in reports_of(9, "a/1", store)[1:]:
        reports.post({"save": 1}, {})
    ranks = reports_of(9, "a/2", store)
    collected: list[dict[str, object]] = []
    collecting = threading.Thread(target=lambda: collected.extend(ranks[0].collect(int)))
    collecting.start()
    for reports in reversed(ranks):
        assert not collected
        reports.post({"save": 2, "rank": reports.rank}, PIECES if reports.rank else {})
    collecting.join(30)
    assert [report["rank"] for report in collected] == list(range(9))
    assert {report["save"] for report in collected} == {2}
    assert collected[0]["pieces"] == {}
    assert all(report["pieces"] == PIECES for report in collected[1:])
    before = store.num_keys()
    ranks[0].clear()
    assert store.num_keys() == before - 10, "those of each rank, and their number"


def test_equal_pieces_of_thousands_of_ranks_are_read_once():
    reports = decoded([encoded({"rank": rank}, PIECES) for rank in range(4096)])
    assert reports[-1] == {"rank": 4095, "pieces": PIECES}
    assert len({id(report["pieces"]) for report in reports}) == 1


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


def values_of(name: str, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(f"{name}{kind}".encode()))
    return torch.randn(SIZES[name], generator=generator)


@pytest.fixture(scope="module", params=LAYOUTS)
def of_four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of four ranks."""
    directory, layout = tmp_path_factory.mktemp(request.param), LAYOUTS[request.param]
    for rank in range(4):
        tensors = {
            key_of(name, low, kind): values_of(name, kind)[low:high].clone()
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
                assert torch.equal(view, values_of(name, kind)[low:high])
        return reader.opened_ranks


def test_a_rank_of_the_same_world_opens_its_own_file_only(of_four):
    layout = of_four.index["layout"]
    assert [opened_by(of_four, layout, rank, 4) for rank in range(4)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_world_and_layout_reads_every_element_from_the_files_that_have_it(
    of_four, layout, ranks
):
    opened = [opened_by(of_four, layout, rank, ranks) for rank in range(ranks)]
    assert set().union(*opened) == {0, 1, 2, 3}
    if layout == of_four.index["layout"] == "flat":
        assert max(map(len, opened)) <= -(-4 // ranks) + 1


def test_what_no_file_has_is_an_error_and_opens_nothing(of_four):
    for name, start, kind in (("query", 40, "weight"), ("none", 0, "weight"), ("query", 0, "ema")):
        with FragmentReader(of_four) as reader:
            with pytest.raises(CheckpointError, match=name):
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
