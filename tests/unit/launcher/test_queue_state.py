from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.slurm import client as slurm
from launcher.slurm.client import JobRecord, QueuedJob, SlurmUnreachable
from launcher.status.queue_state import Queue, ask, joined, with_queue
from launcher.status.run_state import RunState

RUN = RunState(
    name="books",
    path="runs/books",
    state="failed",
    why="its processes ended without a word",
    step=40,
    job="17",
)
BEGUN = replace(RUN, attempts=2)


def queued(state: str, reason: str = "None", start: str = "N/A") -> QueuedJob:
    return QueuedJob(
        id="17",
        array_id="17",
        array_index="",
        name="books-1a",
        state=state,
        reason=reason,
        hosts="",
        elapsed="0:00",
        time_left="1:00",
        start=start,
    )


def record(state: str) -> JobRecord:
    return JobRecord(
        id="17",
        array_task="17",
        name="books-1a",
        state=state,
        exit_code="0:0",
        start="",
        end="",
        hosts="n1",
    )


@pytest.mark.parametrize(
    ("run", "job", "records", "state", "why"),
    [
        (RUN, queued("PENDING", "Resources"), [], "queued", "waits for nodes to become free"),
        (RUN, queued("PENDING", "QOSMaxJobs"), [], "queued", "QOSMaxJobs"),
        (
            RUN,
            queued("PENDING", "Priority", "2026-01-02T03:04:05"),
            [],
            "queued",
            "begin 2026-01-02 03:04:05",
        ),
        (
            BEGUN,
            queued("PENDING", "BeginTime"),
            [],
            "requeued",
            "went back into the queue; may not begin yet",
        ),
        (BEGUN, queued("PENDING"), [record("NODE_FAIL")], "requeued", "a node failed"),
        (
            BEGUN,
            queued("PENDING"),
            [record("NODE_FAIL"), record("PREEMPTED")],
            "preempted",
            "made room",
        ),
        (
            replace(BEGUN, state="preempted", why="preempted"),
            queued("PENDING", "Priority"),
            [],
            "preempted",
            "others",
        ),
        (RUN, queued("RUNNING"), [], "running", "starting"),
        (
            replace(RUN, state="running", why="evaluating"),
            queued("RUNNING"),
            [],
            "running",
            "evaluating",
        ),
        (RUN, queued("COMPLETING"), [], "running", "its job is completing"),
        (RUN, queued("CANCELLED"), [], "cancelled", "after step 40"),
        (
            replace(RUN, state="silent"),
            None,
            [record("CANCELLED by 1000")],
            "cancelled",
            "after step 40",
        ),
        (RUN, queued("TIMEOUT"), [], "failed", "reached the time limit"),
        (
            replace(RUN, state="running"),
            None,
            [record("OUT_OF_MEMORY")],
            "failed",
            "ran out of memory",
        ),
        (replace(RUN, state="queued"), None, [], "failed", "Slurm has forgotten it"),
        (RUN, queued("FAILED"), [], "failed", "its job is gone (failed)"),
        (replace(RUN, why="3 in a row"), queued("FAILED"), [], "failed", "3 in a row"),
        (
            replace(RUN, state="stopped", why="on request"),
            queued("COMPLETED"),
            [],
            "stopped",
            "on request",
        ),
        (replace(RUN, state="done", why=""), queued("COMPLETED"), [], "done", ""),
    ],
)
def test_slurms_word_about_a_job_wins_over_old_signs_of_life(run, job, records, state, why):
    queue = Queue(jobs={"17": job} if job else {}, records={"17": records})
    said = joined(run, "17", queue)
    assert said.state == state
    assert why in said.why
    assert said.job == "17"


def test_without_an_answer_the_directories_word_stands_and_a_line_says_so(monkeypatch, capsys):
    def unreachable(*_: str) -> list[QueuedJob]:
        raise SlurmUnreachable("the Slurm controller does not answer")

    monkeypatch.setattr(slurm, "jobs", unreachable)
    assert with_queue([RUN]) == [RUN]
    assert "told from the directories alone" in capsys.readouterr().err


def test_slurm_is_not_asked_about_runs_it_never_had_or_that_are_done(monkeypatch):
    monkeypatch.setattr(slurm, "jobs", lambda ids: pytest.fail("asked"))
    never = replace(RUN, job=None)
    done = replace(RUN, state="done")
    assert with_queue([never, done]) == [never, done]


def test_accounting_is_asked_only_about_jobs_that_are_forgotten_or_may_have_run_before(monkeypatch):
    asked = []
    running, pending = queued("RUNNING"), replace(queued("PENDING"), id="18", array_id="18")
    monkeypatch.setattr(slurm, "jobs", lambda ids: [running, pending])
    monkeypatch.setattr(slurm, "records", lambda ids: asked.extend(ids) or [])
    assert ask(["17", "18", "19"]).jobs == {"17": running, "18": pending}
    assert asked == ["18", "19"]
