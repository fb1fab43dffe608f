"""Ranks of a node that save into one file: written together, read by lanes, or not published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from foundation.errors import CheckpointError
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.background_save import HostBuffers, RankFile, RankReports, Save, files_of
from pretrain.checkpoint.destinations import Disk
from pretrain.checkpoint.elastic_reader import load_memory, restore_random_state
from pretrain.checkpoint.marker import parts_in
from pretrain.checkpoint.pieces import key_of
from pretrain.distributed.rounds import Worker
from pretrain.model.lane_state import LaneState, Memory, _shape
from pretrain.state import TrainState
from tests.helpers.checkpoints import index_of
from tests.helpers.models import TINY

CPU = torch.device("cpu")
NODES = ((0, 2, 3), (1, 4))  # as a scheduler that deals ranks out in turn has them
LANES = (2, 1, 0, 3, 1)  # of each rank
FIRST = [sum(LANES[:rank]) for rank in range(len(LANES))]


def memory_of(rank: int) -> Memory:
    """The memory of a rank's lanes, of three rows."""
    generator = torch.Generator().manual_seed(rank)
    parts = LaneState(TINY).parts
    return tuple(
        torch.randint(1, 9999, _shape(part, LANES[rank], 3), generator=generator).float()
        for part in parts
    )


def rank_files(rank: int, node: tuple[int, ...]) -> list[RankFile]:
    fragments = {key_of("w", 4 * rank, "weight"): [torch.full((4,), float(rank))]}
    memories: list[Memory | None] = [memory_of(rank)] if LANES[rank] else []
    torch.manual_seed(rank)
    return files_of(fragments, TrainState(step=7, memories=memories), LaneState(TINY), rank, node)


def saves_of(root: Path, nodes: tuple[tuple[int, ...], ...]) -> list[Save]:
    """The ranks' parts of a save, each with a connection of its own; nothing is started."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    disk = Disk(root, "attempt")
    disk.prepare(7, 0)
    saves = {}
    for node in nodes:
        for rank in node:
            own = store if rank == 0 else TCPStore("127.0.0.1", store.port, wait_for_workers=False)
            report = {"first_lane": FIRST[rank], "num_lanes": LANES[rank]}
            report |= {"cursor": None}
            reports = RankReports("a/1", rank, len(LANES), own)
            index = index_of(7, len(LANES))
            saves[rank] = Save(
                disk, rank_files(rank, node), index, report, reports, HostBuffers(CPU)
            )
    return [saves[rank] for rank in range(len(LANES))]


def start(*saves: Save) -> None:
    for save in saves:
        worker = Worker("save")
        worker.add(save.run)
        worker.end()


def save_all(root: Path, nodes: tuple[tuple[int, ...], ...]) -> Path:
    saves = saves_of(root, nodes)
    start(*reversed(saves))
    assert [save.wait_for_publication() for save in saves] == [None] * len(saves)
    assert len(list((root / "step-00000007").iterdir())) == len(LANES) + len(nodes) + 2
    return root / "step-00000007"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_all(tmp_path_factory.mktemp("root"), NODES)


def test_any_lanes_are_read_from_the_files_of_the_ranks_that_had_them(saved):
    found = marker.verify(saved)
    lane_state = LaneState(TINY)
    with_lanes = [lane_state.named(memory_of(rank)) for rank in range(len(LANES)) if LANES[rank]]
    whole = {name: torch.cat([each[name] for each in with_lanes]) for name in with_lanes[0]}
    for lanes in (range(7), range(2, 3), range(1, 6)):
        loaded = load_memory(found, lanes)
        assert loaded is not None
        assert loaded.keys() == whole.keys()
        for name, part in whole.items():
            assert torch.equal(loaded[name], part[lanes.start : lanes.stop]), name


def test_each_rank_finds_its_own_random_state(saved):
    found = marker.verify(saved)
    for rank in range(len(LANES)):
        torch.manual_seed(rank)
        expected = torch.get_rng_state()
        torch.manual_seed(99)
        restore_random_state(found, rank)
        assert torch.equal(torch.get_rng_state(), expected)


def test_a_bit_of_any_rank_is_found_by_the_one_rank_that_hashes_it(saved):
    found = marker.verify(saved)
    for part in parts_in(found.index):
        path = saved / part.name
        content = bytearray(path.read_bytes())
        content[part.start + part.bytes - 1] ^= 1
        path.write_bytes(content)
        refusing = list(refusals(found, world_size=5))
        assert len(refusing) == 1
        assert f"{part.name}: its contents changed" in refusing[0]
        content[part.start + part.bytes - 1] ^= 1
        path.write_bytes(content)
    assert not list(refusals(found, world_size=5))


def refusals(found: marker.Checkpoint, world_size: int) -> Iterator[str]:
    for rank in range(world_size):
        try:
            marker.check_share(found, rank, world_size)
        except CheckpointError as error:
            yield str(error)


@pytest.mark.parametrize("when", ["before its header", "before its part"])
def test_without_the_part_of_one_rank_nothing_is_published(tmp_path, when):
    saves = saves_of(tmp_path, NODES)
    lost = saves[3]
    if when == "before its part":
        lost._put = lost._copy  # as if it was killed after it had copied
        start(lost)
    start(*(save for save in saves if save is not lost))
    others = [save for save in saves if save._reports.rank in (1, 4)]
    assert [save.wait_for_files() for save in others] == [None, None], "another node's"
    for save in saves:
        if save is not lost or when == "before its part":
            save.cancel()
    assert not saves[0].is_published
    assert files.steps_on_disk(tmp_path) == []
    assert marker.latest_step(tmp_path) == 0
