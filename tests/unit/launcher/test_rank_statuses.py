from __future__ import annotations

import math
from pathlib import Path

import pytest

from launcher.slurm.rank_statuses import (
    RankEnd,
    first_failure,
    read_ends,
    seconds_left_to_srun,
    statuses,
)
from pretrain.rundir.exit_status import EXIT_STOPPED, NEVER_STARTED


def test_a_rank_without_a_status_was_killed_with_its_task_and_one_without_a_log_never_started(
    tmp_path: Path,
):
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(3)]
    for log in logs[:2]:
        log.touch()
    logs[0].with_suffix(".status").write_text("75")
    assert statuses(read_ends(logs), logs) == [EXIT_STOPPED, -9, NEVER_STARTED]


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
