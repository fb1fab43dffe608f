"""Exchanges in log2(ranks) rounds: real gloo ranks, powers of two and others."""

import re
import subprocess
import sys
import threading
from typing import Any

import pytest

from pretrain.distributed.collectives import any_rank
from pretrain.distributed.messages import num_rounds
from pretrain.distributed.rendezvous import LARGEST_MESH
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.recovery.stop_requests import Agreement, StopRequest
from tests.helpers.stop_ranks import ASKED_AT, MOST_ASKED, found_by_ranks


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return found_by_ranks()


WORLDS = ["2", "3", "5", "16 on demand"]


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_stop_at_one_step_whichever_was_asked_and_agree_on_its_flags(found, world):
    ranks = [stops for stops, _ in found[world]]
    assert len(ranks) == int(world.split()[0])
    # One that is asked after it has told the others takes part in the next step.
    asked = range(min(len(ranks), MOST_ASKED))
    steps = [ASKED_AT if number % 2 else ASKED_AT + 1 for number in asked]
    assert ranks == [steps] * len(ranks)


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_get_all_values_and_the_first_error_in_log2_rounds(found, world):
    ranks = [collected for _, collected in found[world]]
    size, rounds = len(ranks), num_rounds(len(ranks))
    for rank in ranks:
        assert rank["values"] == ["r" * other for other in range(size)]
        assert rank["numbers"] == [[[size * (size - 1) // 2, 2 * size]], [size - 1, 0]]
        assert rank["raised"] == "of rank 1"
        # Of the values: their sizes, themselves; a sum, a maximum. Without an error: one flag.
        assert rank["messages"] == [4 * rounds, rounds]


def test_a_rank_that_waits_names_the_one_that_is_late(found):
    for waits in found["late"][:2]:
        (line,) = waits
        assert re.match(r"waiting for rank 2 .* 1 ", line)
    assert found["late"][2] == []


def test_all_ranks_end_an_evaluation_at_the_same_batch(found):
    # Asked in a batch, the rank says so before the next one, and all learn of it one later.
    assert found["evaluation"] == [[8, ASKED_AT + 2]] * 3


def test_the_others_raise_that_a_rank_has_gone(found):
    first, gone, last = found["lost"]
    assert gone is None
    assert all("by peer" in error for error in (first, last))


def test_one_rank_starts_no_thread_and_says_what_is_true_when_asked():
    init_world()
    try:
        before, flags = threading.active_count(), Agreement()
        stop = StopRequest()
        answer = stop.ask(lambda: flags)
        flags = Agreement(save_failed=True)
        assert answer() == flags
        assert [any_rank(True), any_rank(False)] == [True, False]
        assert threading.active_count() == before
        stop.restore_handlers()
    finally:
        destroy_process_group()


def test_rounds_grow_with_the_logarithm():
    assert [num_rounds(size) for size in (1, 2, 3, 4, 5, 64, 4096)] == [0, 1, 2, 2, 3, 6, 12]


# Each case in a process of its own: a hard limit cannot be raised again.
LIMITED = """
import os, resource, sys
from pretrain.distributed.world import prepare_descriptors
for case in sys.argv[1:]:
    if not (pid := os.fork()):
        world_size, soft, hard = map(int, case.split())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        prepare_descriptors(world_size)
        found = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        print(found, os.environ.get("TORCH_GLOO_LAZY_INIT", "mesh"), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_rank_may_open_what_its_hard_limit_allows():
    expected = {
        "2 1024 4096": "4096 mesh",
        f"{LARGEST_MESH} 1024 1024": "1024 mesh",
        f"{LARGEST_MESH + 1} 1024 8192": "8192 1",
    }
    command = [sys.executable, "-c", LIMITED, *expected]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == list(expected.values())
