"""Random histories of checkpoints, the same ones every time, and those that failed once."""

import errno
from typing import Any

import pytest

from tests.histories.checkpoint_machine import CheckpointHistory
from tests.histories.runner import replay, run_histories

BATCHES, HISTORIES = 10, 30

FAILED_ONCE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "an emptied run directory let a run begin anew": [
        ("change_settings", {"has_local": False}),
        ("train", {"steps": 7, "is_killed": True}),
        ("empty", {"where": "shared"}),
        ("train", {"steps": 4}),
    ],
    "a run with an emptied directory began below what its store had": [
        ("train", {"steps": 4, "is_killed": True}),
        ("read", {"meanwhile_before": 5, "steps": 3}),
        ("empty", {"where": "shared"}),
        ("train", {"steps": 4}),
    ],
    "a damaged shared checkpoint hid later ones on the nodes' disks": [
        ("change_ranks", {"world_size": 3}),
        ("train", {"steps": 11}),
        ("damage", {"file": 52, "how": "flip", "where": 87}),
        ("train", {"steps": 3}),
    ],
    "a damaged newest checkpoint was not taken from the store": [
        ("train", {"steps": 5}),
        ("damage", {"file": 0, "how": "format", "where": 3}),
        ("train", {"steps": 7}),
    ],
    "a run that was fetched could not rewind to a step that only its store had": [
        ("train", {"steps": 9}),
        ("poison", {"after": 0, "length": 5}),
        ("train", {"steps": 1}),
        ("fetch", {"elsewhere": True}),
        ("train", {"steps": 4}),
    ],
    "a checkpoint that was pruned while it was read was called damaged": [
        ("train", {"steps": 6, "is_killed": True}),
        ("read", {"meanwhile_before": 4, "steps": 5}),
    ],
    "an unreadable run directory was one rank's line and the others' traceback": [
        ("change_ranks", {"world_size": 2}),
        ("fail", {"where": "run", "how": errno.EIO}),
        ("train", {"steps": 7}),
    ],
    "a start from the nodes' disks in an emptied run directory took a step out of the store": [
        ("train", {"steps": 6}),
        ("go_away", {"where": "store"}),
        ("go_away", {"where": "shared"}),
        ("give_up", {"choice": 54, "kill_before": 24}),
        ("put_back", {"where": 73}),
        ("go_away", {"where": "store"}),
        ("train", {"steps": 3}),
    ],
    "a step that was made again while it was verified was called damaged": [
        ("train", {"steps": 3, "is_killed": False}),
        ("poison", {"after": 2, "length": 3}),
        ("train", {"steps": 4, "is_killed": True}),
        ("read", {"meanwhile_before": 12, "steps": 7}),
    ],
    "a start that was killed before it began hid checkpoints from the status": [
        ("slow_down", {"removals": 2, "uploads": 3}),
        ("train_and_kill", {"kill_before": 233}),
        ("give_up", {"choice": 21, "kill_before": 28}),
        ("give_up", {"choice": 47, "kill_before": 46}),
    ],
    "a damaged step in the store that the run had given up stopped a start": [
        ("train_and_kill", {"kill_before": 243}),
        ("train", {"steps": 7, "is_killed": True}),
        ("give_up", {"choice": 65, "kill_before": 18}),
        ("train_and_kill", {"kill_before": 81}),
        ("empty", {"where": "shared"}),
        ("damage", {"file": 8, "how": "delete", "where": 85}),
        ("train", {"steps": 7, "is_killed": False}),
    ],
    "a damaged step in the store, whose upload the ledger had not, stopped a start": [
        ("train_and_kill", {"kill_before": 148}),
        ("give_up", {"choice": 18, "kill_before": 47}),
        ("empty", {"where": "store"}),
        ("give_up", {"choice": 77, "kill_before": 31}),
        ("train", {"steps": 4, "is_killed": False}),
    ],
    "a damaged step in the run directory that the run had given up stopped a start": [
        ("change_settings", {"has_local": False, "has_mirror": False}),
        ("train", {"steps": 3}),
        ("give_up", {"choice": 0, "kill_before": 40}),
        ("damage", {"file": 1, "how": "truncate", "where": 0}),
        ("train", {"steps": 1}),
    ],
    "damaged steps on a node's disk alone stopped a start": [
        ("train", {"steps": 2, "is_killed": True}),
        ("damage", {"file": 2, "how": "delete", "where": 0}),
        ("train", {"steps": 7}),
    ],
    "a start that was killed before it began hid checkpoints, and one that was refused did, too": [
        ("change_settings", {"has_local": False, "has_mirror": False}),
        ("train", {"steps": 7}),
        ("give_up", {"choice": 2, "kill_before": 22}),
        ("give_up", {"choice": 1, "kill_before": 0}),
    ],
    "what the ledger knows did not reach the other ranks": [
        ("change_ranks", {"world_size": 2}),
        ("train", {"steps": 6, "is_killed": True}),
    ],
}


@pytest.mark.parametrize("seed", range(BATCHES))
def test_a_run_gives_up_nothing_it_has_published_whatever_happens(seed: int) -> None:
    run_histories(CheckpointHistory, HISTORIES, seed)


@pytest.mark.parametrize("name", FAILED_ONCE)
def test_histories_that_failed_once_are_mended(name: str) -> None:
    replay(CheckpointHistory, FAILED_ONCE[name])
