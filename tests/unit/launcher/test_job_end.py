from __future__ import annotations

import pytest

from launcher.slurm.cluster import ClusterConfig
from launcher.slurm.job_end import JobEnd, end_of
from launcher.slurm.job_history import (
    LOST_HOST,
    excluded_nodes,
    node_to_exclude,
    open_start,
    other_jobs,
    past_attempts,
)
from launcher.slurm.srun import Step
from launcher.status.journal import last_turn

RUNNING = {"JobState": "RUNNING", "Reason": "None", "PreemptTime": "None", "Restarts": "2"}
REQUEUED = {**RUNNING, "JobState": "COMPLETING", "Restarts": "3"}


@pytest.mark.parametrize(
    ("fields", "log", "warned", "end"),
    [
        (RUNNING, "", True, JobEnd("time limit near", requeue=True)),
        (RUNNING, "", False, JobEnd("asked to stop", requeue=True)),
        (
            {**RUNNING, "PreemptTime": "2026-11-21T07:57:06"},
            "",
            False,
            JobEnd("preempted", requeue=True),
        ),
        (
            {**RUNNING, "Reason": "TimeLimit"},
            "",
            True,
            JobEnd("time limit", requeue=True, at_once=True),
        ),
        (
            {**RUNNING, "JobState": "CANCELLED"},
            "",
            False,
            JobEnd("cancelled", requeue=False, at_once=True),
        ),
        (
            {**RUNNING, "JobState": "COMPLETING"},
            "",
            True,
            JobEnd("cancelled", requeue=False, at_once=True),
        ),
        (
            REQUEUED,
            "*** JOB 4 ON n1 CANCELLED AT T DUE TO PREEMPTION ***",
            False,
            JobEnd("preempted", requeue=False),
        ),
        (
            REQUEUED,
            "*** STEP 4.0 ON n1 CANCELLED AT T DUE TO JOB REQUEUE ***",
            False,
            JobEnd("requeued by hand", False),
        ),
        (REQUEUED, "", False, JobEnd("ended by Slurm", requeue=False)),
    ],
)
def test_why_a_job_ends_and_who_requeues_it(fields, log, warned, end):
    assert end_of(fields, 2, log, warned) == end


def test_a_failed_host_is_named():
    log = (
        "srun: error: Node failure on n2\n"
        "*** JOB 3 ON n1 CANCELLED AT T DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"
    )
    assert end_of(REQUEUED, 2, log) == JobEnd("host n2 failed", requeue=False)


def started(job: str, restart: int = 0, step: int = 0) -> dict:
    return {"event": "job_started", "job": job, "restart": restart, "step": step}


def ended(job: str, why: str, requeued: bool = False, **more) -> dict:
    return {"event": "job_ended", "job": job, "why": why, "requeued": requeued, **more}


def attempt(job: str, then: str, before: int, after: int, first: int | None = None) -> dict:
    ended = {
        "event": "attempt_ended",
        "job": job,
        "statuses": [-9, 1, 1, 1],
        "next": then,
        "first_failure": first,
    }
    return {**ended, "step_before": before, "step": after}


def test_attempts_of_former_starts_count_unless_they_were_asked_to_stop():
    ledger = [
        attempt("6", "retry", 0, 0),
        started("7"),
        attempt("7", "retry", 0, 50),
        attempt("7", "stopped", 50, 80),
        ended("7", "preempted", requeued=True),
        started("7", 1, 80),
        ended("7", LOST_HOST, requeued=True, step_before=80, step=80),
        started("7", 2, 80),
    ]
    attempts = past_attempts(ledger, "7")
    assert [(each.step_before, each.step_after) for each in attempts] == [(0, 50), (80, 80)]
    assert [each.made_progress for each in attempts] == [True, False]


def test_a_start_that_could_not_say_how_it_ended_is_found():
    first = started("7")
    assert open_start([], "7") is None
    assert open_start([first], "7") == first
    assert open_start([first], "8") is None
    assert open_start([first, ended("7", "preempted", requeued=True)], "7") is None


def test_of_two_jobs_only_the_later_one_finds_the_other():
    ledger = [started("7"), started("8")]
    assert other_jobs(ledger, "8") == ["7"]
    assert other_jobs(ledger, "7") == []
    assert other_jobs([*ledger[:1], ended("7", "finished"), started("8")], "8") == []
    assert other_jobs([*ledger[:1], ended("7", "preempted", requeued=True), started("8")], "8") == [
        "7"
    ]


STEP = Step(hosts=("n1", "n2"), nodes=2, ranks=4, cluster=ClusterConfig(ranks_per_node=2))


@pytest.mark.parametrize(
    ("attempts", "host"),
    [
        ([attempt("7", "retry", 5, 5, 2), attempt("7", "retry", 5, 5, 3)], "n2"),
        ([attempt("7", "retry", 5, 5, 2)], None),
        ([attempt("7", "retry", 5, 5, 0), attempt("7", "retry", 5, 5, 3)], None),
        (
            [
                attempt("7", "retry", 5, 5, 2),
                attempt("7", "retry", 5, 9, 2),
                attempt("7", "retry", 9, 9, 2),
            ],
            None,
        ),
        ([attempt("7", "retry", 0, 5, 2), attempt("7", "retry", 5, 9, 2)], None),
        ([attempt("8", "retry", 5, 5, 2), attempt("7", "retry", 5, 5, 3)], None),
    ],
)
def test_a_host_that_fails_twice_in_a_row_without_progress_is_left(attempts, host):
    earlier = [started("7"), attempt("7", "retry", 0, 0, 2), ended("7", "preempted", requeued=True)]
    assert node_to_exclude([*earlier, started("7", 1), *attempts], "7", STEP) == host


def test_hosts_that_were_left_are_remembered():
    ledger = [
        started("7"),
        ended("7", "x", left="n2"),
        ended("8", "x", left="n3"),
        ended("7", "y", left="n1"),
    ]
    assert excluded_nodes(ledger, "7") == ["n2", "n1"]


def test_what_ranks_say_after_the_end_of_their_job_is_no_turn_of_the_run():
    over = [
        started("7"),
        ended("7", "cancelled"),
        {"event": "stop", "step": 2},
        attempt("7", "stopped", 0, 2),
    ]
    turn = last_turn(over)
    assert turn is not None
    assert turn["event"] == "job_ended"
    again = last_turn([*over, {"event": "submitted", "job": "8"}, started("8")])
    assert again is not None
    assert again["job"] == "8"
