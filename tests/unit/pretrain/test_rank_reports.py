"""Reports of a save's ranks, over a real store: all arrive, in order, and none of another save."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from pretrain.checkpoint import directory as files
from pretrain.checkpoint.background_save import RankReports, SaveCanceled, decoded, encoded

RANKS = 64
CPU = torch.device("cpu")
PIECES = {"w": {"kinds": ["weight"], "pieces": [[0, 100]]}}


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def reports_of(store: TCPStore, name: str, rank: int) -> RankReports:
    """As a rank of its own has them: over its own connection."""
    own = store if rank == 0 else TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    return RankReports(name, rank, RANKS, own)


def test_rank_0_gets_every_report_in_rank_order_as_soon_as_the_last_is_posted(store):
    ranks = [reports_of(store, "a/1", rank) for rank in range(RANKS)]
    waits: list[int] = []
    found: list[dict[str, object]] = []
    collecting = threading.Thread(
        target=lambda: found.extend(ranks[0].collect(lambda: waits.append(1)))
    )
    collecting.start()
    for rank in reversed(range(RANKS)):
        assert not found
        ranks[rank].post({"rank": rank}, PIECES if rank else {})
    collecting.join(30)
    assert [each["rank"] for each in found] == list(range(RANKS))
    assert found[0]["pieces"] == {}
    assert all(each["pieces"] == PIECES for each in found[1:])
    ranks[0].clear()
    assert store.num_keys() <= 1, "nothing is left but what the store itself has"


def test_what_a_save_that_was_given_up_has_left_is_not_taken_for_the_next(store):
    first = [reports_of(store, "a/1", rank) for rank in range(RANKS)]
    for rank in range(1, RANKS):
        first[rank].post({"save": 1}, {})

    def cancel() -> None:
        raise SaveCanceled

    with pytest.raises(SaveCanceled):
        first[0].collect(cancel)
    second = [reports_of(store, "a/2", rank) for rank in range(RANKS)]
    for reports in second:
        reports.post({"save": 2}, {})
    assert [each["save"] for each in second[0].collect(cancel)] == [2] * RANKS


def test_ranks_of_a_node_get_each_others_headers_and_leave_nothing_in_the_store(store):
    nodes = ((0, 2, 5), (1, 3))
    ranks = {rank: reports_of(store, "a/1", rank) for node in nodes for rank in node}
    found: dict[int, dict[int, bytes]] = {}
    waits: list[int] = []

    def ask(rank: int, node: tuple[int, ...]) -> None:
        found[rank] = ranks[rank].headers(node, lambda: waits.append(rank))

    asking = [threading.Thread(target=ask, args=(n, node)) for node in nodes for n in node]
    for thread in asking:
        thread.start()
    for node in nodes:
        for rank in reversed(node):
            assert not found.keys() & set(node), "before all of the node have posted"
            ranks[rank].post_header(b"header of %d" % rank, node)
    for thread in asking:
        thread.join(30)
    for node in nodes:
        for rank in node:
            assert list(found[rank].items()) == [(each, b"header of %d" % each) for each in node]
    assert store.num_keys() <= 1


def test_a_rank_that_waits_for_the_header_of_one_that_ended_can_be_canceled(store):
    first = reports_of(store, "a/1", 0)
    first.post_header(b"alone", (0, 1))

    def cancel() -> None:
        raise SaveCanceled

    with pytest.raises(SaveCanceled):
        first.headers((0, 1), cancel)


def test_equal_pieces_of_thousands_of_ranks_are_read_once():
    found = decoded([encoded({"rank": rank}, PIECES) for rank in range(4096)])
    assert found[-1] == {"rank": 4095, "pieces": PIECES}
    assert len({id(each["pieces"]) for each in found}) == 1


def test_a_directory_of_many_files_is_removed_whole(tmp_path: Path):
    for name in ("step-00000001", ".partial-00000002-attempt"):
        (tmp_path / name / "folder").mkdir(parents=True)
        for n in range(files.MANY_FILES):
            (tmp_path / name / f"file-{n}").write_text("x")
    files.remove(tmp_path / "step-00000001")
    files.remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == []
