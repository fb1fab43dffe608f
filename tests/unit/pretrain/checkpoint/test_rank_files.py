"""The file that each rank saves: written without the library, read by it, by slices and lanes."""

import random
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from foundation.files import content_of
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.disk import BLOCK_BYTES, Disk, TensorFile, write_file
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.load import FragmentReader, restore_random_state
from pretrain.checkpoint.pieces import (
    merged_pieces,
    parsed_pieces,
    piece_key,
    piece_report,
    rank_elements,
)
from pretrain.checkpoint.save import RankFile, Save
from pretrain.checkpoint.tensor_layout import HostBuffer, SplitTensors, copy_to_host, lay_out
from pretrain.checkpoint.transfer import RankReports, decoded, encoded
from pretrain.checkpoint.verify import rank_share, verify
from pretrain.distributed.messages import Worker
from pretrain.errors import CheckpointError
from pretrain.model.memory import MemoryLayout
from pretrain.state import TrainState
from tests.helpers.checkpoints import index_of
from tests.helpers.models import TINY


def written(path: Path, tensors: SplitTensors) -> dict[str, object]:
    layout = lay_out(tensors)
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
        "pieces": [random(2, 3, 2), random(1, 3, 2)],
    }
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"x" * 99_999)  # of a former try
    described = written(path, tensors)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, pieces in tensors.items():
        assert loaded[name].dtype == pieces[0].dtype
        assert torch.equal(loaded[name], torch.cat(pieces)), name
    assert described == vars(content_of(path))


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


def saves_of(root: Path) -> list[Save]:
    """The ranks' parts of a save, each with a connection of its own; nothing is started."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    disk = Disk(root, "attempt")
    disk.prepare(7, 0)
    saves = []
    for rank, num_lanes in enumerate(LANES):
        own = TCPStore("127.0.0.1", store.port, wait_for_workers=False) if rank else store
        fragments = {piece_key("w", 4 * rank, "weight"): [torch.arange(4.0) + 4 * rank]}
        torch.manual_seed(rank)
        file = RankFile.of(fragments, TrainState(step=7, memories=[]), MemoryLayout(TINY))
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("root")
    saves = saves_of(root)
    start(*reversed(saves))
    assert [save.wait() for save in saves] == [None] * len(saves)
    return verify(files.step_directory(root, 7))


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
    assert problem.is_transient
    assert re.search(r"^rank 3: .*rank-00003\.safetensors", problem.text)
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


@pytest.mark.parametrize(
    ("start", "length", "opened"),
    [(4, 4, [1]), (0, 20, [0, 1, 2, 3, 4]), (6, 7, [1, 2, 3]), (3, 2, [0, 1])],
)
def test_elements_are_read_from_the_files_that_have_them_alone(saved, start, length, opened):
    """Of any layouts of ZeRO: tests/integration/test_elastic.py."""
    with FragmentReader(saved) as reader:
        view = torch.empty(length)
        reader.copy_into(view, "w", start, "weight")
        assert view.tolist() == [float(each) for each in range(start, start + length)]
        assert sorted(reader.opened_ranks) == opened


def test_what_no_file_has_is_an_error_and_opens_nothing(saved):
    for name, start, kind in (("w", 16, "weight"), ("none", 0, "weight"), ("w", 0, "ema")):
        with FragmentReader(saved) as reader:
            with pytest.raises(CheckpointError, match=name):
                reader.copy_into(torch.empty(9), name, start, kind)
            assert kind == "weight" or not reader.opened_ranks


@pytest.mark.parametrize("ranks", [1, 4, 5, 300])
def test_the_index_says_for_each_rank_exactly_what_it_reported_in_few_runs(ranks):
    """Each has a part of two parameters, of one the last parts are short or empty."""
    reported = []
    for rank in range(ranks):
        ends = {"even": (4 * rank, 4 * rank + 4), "odd": (2 * rank, min(2 * rank + 2, ranks + 1))}
        reported.append({
            piece_key(name, low, kind): high - low
            for name, (low, high) in ends.items() if low < high for kind in ("weight", "exp_avg")
        })  # fmt: skip
    index = {
        "pieces": merged_pieces(piece_report(each, rank) for rank, each in enumerate(reported))
    }
    pieces = parsed_pieces(index, ranks)
    assert [rank_elements(pieces, rank) for rank in range(ranks)] == reported
    assert (pieces["even"].num_elements, pieces["odd"].num_elements) == (4 * ranks, ranks + 1)
    assert max(len(held.runs) for held in pieces.values()) <= 3, "whatever the number of ranks"


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("saved_by", [1, 2, 5, 64])
def test_each_file_is_hashed_by_one_rank_and_no_rank_by_far_too_many(saved_by, world_size):
    generator = random.Random(saved_by * world_size)
    sizes = [generator.choice([0, 1, 50, 900, 1000]) for _ in range(saved_by)]
    shares = [rank_share(sizes, rank, world_size) for rank in range(world_size)]
    assert [number for share in shares for number in share] == list(range(saved_by))
    largest = max(sum(sizes[number] for number in share) for share in shares)
    assert largest <= sum(sizes) / world_size + 1000, "a share, and at most one file more"
