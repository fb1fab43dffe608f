from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from launcher.slurm import srun
from launcher.slurm.srun import (
    RankEnd,
    RankEnds,
    _end_in,
    first_failure,
    seconds_left_to_srun,
)
from pretrain.rundir.exit_status import EXIT_STOPPED, NEVER_STARTED


def test_a_rank_without_a_status_was_killed_with_its_task_and_one_without_a_log_never_started(
    tmp_path: Path,
):
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(3)]
    for log in logs[:2]:
        log.touch()
    logs[0].with_suffix(".status").write_text("75")
    ends = RankEnds(logs)
    ends.read_rest()
    assert ends.statuses() == [EXIT_STOPPED, -9, NEVER_STARTED]


def test_each_of_4096_statuses_is_read_once_as_it_comes_and_many_at_a_time(tmp_path, monkeypatch):
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(4096)]
    ends, opened, at_work, most = RankEnds(logs), [], set(), 0

    def end_in(file: Path) -> RankEnd | None:
        nonlocal most
        opened.append(file)
        at_work.add(file)
        most = max(most, len(at_work))
        time.sleep(1e-4)  # as a server that is asked
        at_work.remove(file)
        return _end_in(file)

    monkeypatch.setattr(srun, "_end_in", end_in)
    ends.look()
    for rank in range(1, 4096, 2):
        logs[rank].with_suffix(".status").write_text("-15")
    ends.look()
    assert sorted(ends.found) == list(range(1, 4096, 2))
    for rank in range(0, 4096, 2):
        logs[rank].touch()
        if rank:
            logs[rank].with_suffix(".status").write_text("1")
    ends.look()
    assert len(opened) == len(set(opened)) == 4095
    assert most > 8
    ends.read_rest()
    assert opened[4095:] == [logs[0].with_suffix(".status")], "the one that is missing"
    assert ends.statuses() == [-9, *([-15, 1] * 2048)[:-1]]


@pytest.mark.parametrize(
    ("ended", "waits"),
    [
        ([0, 0, 75], 30),  # for a slurmstepd that was killed
        ([1, 1, 1], 30),
        ([0, -9], 300),  # srun should have killed the third
        ([0, 0], math.inf),  # the third may still be saving
        ([], math.inf),
    ],
)
def test_srun_is_not_waited_for_once_every_rank_has_ended_or_one_has_failed_long_ago(ended, waits):
    ends = {rank: RankEnd(status, 0.0) for rank, status in enumerate(ended)}
    assert seconds_left_to_srun(ends, num_ranks=3) == waits


@pytest.mark.parametrize(
    ("statuses", "ended", "log", "rank"),
    [
        ([1, -9, 1, 1], {0: 2.0, 1: 3.0, 2: 1.0, 3: 4.0}, "", 1),
        ([-9, -9, 1, 1], {2: 2.0, 3: 1.0}, "", 3),
        ([1, 2, -9], {0: 1.0, 1: 3.0, 2: 2.0}, "", 1),  # it knows what is wrong
        ([75, 0, 1, 0], {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}, "", 2),
        (
            [-9, -9, -9, -9],
            {},
            "srun: job 3\nsrun: error: n2: tasks 2-3: Exited with exit code 1\n",
            2,
        ),
        (
            [-15, -15, -9, -9],
            {0: 1.0, 1: 1.0},
            "srun: error: n2: tasks 2-3: Exited with exit code 1\n",
            2,
        ),
        ([-9, -9, -9, -9], {}, "", None),
        ([75, 75], {0: 1.0, 1: 1.0}, "srun: error: n1: tasks 0-1: Exited with exit code 1\n", None),
        ([0, 0, 0, 0], {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "", None),
    ],
)
def test_the_rank_that_failed_first_hand_is_found(statuses, ended, log, rank):
    ends = {each: RankEnd(statuses[each], when) for each, when in ended.items()}
    assert first_failure(ends, len(statuses), log) == rank
