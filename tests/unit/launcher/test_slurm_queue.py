from __future__ import annotations

import errno
import re
from dataclasses import replace

import pytest

from foundation.errors import UserError
from launcher.slurm import client as slurm
from launcher.slurm.client import JobRecord, QueuedJob, SlurmUnreachable
from launcher.status import slurm_queue
from launcher.status.infer_status import State
from launcher.status.run_state import RunState
from launcher.status.slurm_queue import Queue, ask, joined, read_states, with_queue
from tests.helpers.owners import give_away

RUN = RunState(
    name="books",
    path="runs/books",
    state=State.FAILED,
    reason="its processes ended silently",
    is_lost=True,
    step=40,
    job="17",
    job_names=("books-1a",),
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
        nodes="",
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
        nodes="n1",
    )


@pytest.mark.parametrize(
    ("run", "job", "records", "state", "reason"),
    [
        (RUN, queued("PENDING", "Resources"), [], "queued", "waiting (Resources)"),
        (
            RUN,
            queued("PENDING", "launch failed requeued held"),
            [],
            "queued",
            "waiting (launch failed requeued held); 'scontrol release 17' lets it start",
        ),
        (
            BEGUN,
            queued("PENDING", "JobHeldUser", "2026-01-02T03:04:05"),
            [],
            "requeued",
            "requeued; waiting (JobHeldUser); 'scontrol release 17' lets it start",
        ),
        (
            RUN,
            queued("SPECIAL_EXIT", "None"),
            [],
            "queued",
            "waiting (None); 'scontrol release 17' lets it start",
        ),
        (
            RUN,
            queued("PENDING", "Priority", "2026-01-02T03:04:05"),
            [],
            "queued",
            "start 2026-01-02 03:04:05",
        ),
        (BEGUN, queued("PENDING"), [record("NODE_FAIL")], "requeued", "a node failed"),
        (
            BEGUN,
            queued("PENDING"),
            [record("NODE_FAIL"), record("PREEMPTED")],
            "preempted",
            "preempted by another job",
        ),
        (
            replace(BEGUN, state=State.PREEMPTED, reason="preempted"),
            queued("PENDING", "Priority"),
            [],
            "preempted",
            "preempted; waiting (Priority)",
        ),
        (RUN, queued("RUNNING"), [], "running", "starting"),
        (
            replace(RUN, state=State.RUNNING, reason="evaluating"),
            queued("RUNNING"),
            [],
            "running",
            "evaluating",
        ),
        (RUN, queued("COMPLETING"), [], "running", "its job is completing"),
        (RUN, queued("CANCELLED"), [], "canceled", "after step 40"),
        (
            replace(RUN, state=State.UNRESPONSIVE),
            None,
            [record("CANCELLED by 1000")],
            "canceled",
            "after step 40",
        ),
        (RUN, queued("TIMEOUT"), [], "failed", "reached the time limit"),
        (
            replace(RUN, state=State.RUNNING),
            None,
            [record("OUT_OF_MEMORY")],
            "failed",
            "ran out of host memory",
        ),
        (
            replace(RUN, state=State.QUEUED),
            None,
            [],
            "canceled",
            "left the queue unstarted",
        ),
        (RUN, queued("FAILED"), [], "failed", "its job has ended (failed)"),
        (
            replace(RUN, reason="3 in a row", is_lost=False),
            queued("FAILED"),
            [],
            "failed",
            "3 in a row",
        ),
        (
            replace(RUN, state=State.STOPPED, reason="on request"),
            queued("COMPLETED"),
            [],
            "stopped",
            "on request",
        ),
        (replace(RUN, state=State.DONE, reason=""), queued("COMPLETED"), [], "done", ""),
        (
            replace(RUN, state=State.DONE, reason="", is_job_open=True),
            queued("RUNNING"),
            [],
            "done",
            "its job 17 still holds its nodes",
        ),
        (
            replace(RUN, state=State.STOPPED, reason="on request", is_job_open=True),
            queued("FAILED"),
            [],
            "failed",
            "failed and could not write why: it was killed, or storage failed",
        ),
        (
            replace(BEGUN, state=State.UNRESPONSIVE, reason="no heartbeat from n1 for 6.7 min"),
            queued("RUNNING"),
            [],
            "running",
            "no heartbeat from n1",
        ),
        (
            replace(RUN, state=State.QUEUED),
            queued("FAILED"),
            [],
            "failed",
            "failed before its supervisor began; see 'launcher logs RUN --errors'",
        ),
        (
            replace(BEGUN, state=State.RUNNING),
            queued("PREEMPTED"),
            [],
            "preempted",
            "'launcher resume' continues the run",
        ),
        (
            replace(BEGUN, state=State.PREEMPTED, reason="not requeued", needs_resume=True),
            None,
            [],
            "preempted",
            "not requeued",
        ),
    ],
)
def test_what_slurm_says_about_a_job_wins_over_heartbeats(run, job, records, state, reason):
    queue = Queue(jobs={"17": job} if job else {}, records={"17": records})
    found = joined(run, "17", queue)
    assert found.state == state
    assert reason in found.reason
    assert found.job == "17"


def test_a_job_of_another_name_has_only_the_same_number():
    other = replace(queued("RUNNING"), name="jupyter")
    queue = Queue(jobs={"17": other}, records={"17": [replace(record("NODE_FAIL"), name="x")]})
    found = joined(RUN, "17", queue)
    assert (found.state, found.reason) == ("failed", "its job has ended: it is unknown to Slurm")
    run = replace(RUN, state=State.STOPPED, reason="on request")
    assert joined(run, "17", queue) == run


def test_a_preempted_run_whose_job_slurm_has_ended_may_be_resumed():
    run = replace(BEGUN, state=State.PREEMPTED)
    assert run.is_active
    ended = joined(run, "17", Queue(jobs={"17": queued("PREEMPTED")}, records={}))
    assert not ended.is_active
    assert not queued("PREEMPTED").is_live


def test_a_run_that_may_not_be_read_is_told_as_other_files_are(tmp_path, monkeypatch):
    def read_state(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "run.json"))

    monkeypatch.setattr(slurm_queue, "read_state", read_state)  # root may read everything
    closed, other = read_states([tmp_path, tmp_path])
    said = f"{tmp_path}/run.json: Permission denied; give this user the permissions"
    assert closed.reason.startswith(said)
    assert closed.state == other.state == State.DAMAGED
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        read_states([tmp_path])
    give_away(tmp_path, monkeypatch)
    assert read_states([tmp_path] * 2)[0].reason.endswith(f"{tmp_path} is another user's run")


def test_without_an_answer_the_states_of_the_directories_stand_with_a_warning(monkeypatch, caplog):
    def unreachable(*_: str) -> list[QueuedJob]:
        raise SlurmUnreachable("the Slurm controller does not respond")

    monkeypatch.setattr(slurm, "jobs", unreachable)
    assert with_queue([RUN]) == [RUN]
    assert "derived from the directories alone" in caplog.text


def test_slurm_is_not_asked_about_runs_it_never_had_or_that_are_done(monkeypatch):
    monkeypatch.setattr(slurm, "jobs", lambda ids: pytest.fail("asked"))
    never = replace(RUN, job=None)
    done = replace(RUN, state=State.DONE)
    assert with_queue([never, done]) == [never, done]


def test_accounting_is_asked_only_about_jobs_that_are_forgotten_or_may_have_run_before(monkeypatch):
    asked = []
    running, pending = queued("RUNNING"), replace(queued("PENDING"), id="18", array_id="18")
    monkeypatch.setattr(slurm, "jobs", lambda ids: [running, pending])
    monkeypatch.setattr(slurm, "records", lambda ids: asked.extend(ids) or [])
    assert ask(["17", "18", "19"]).jobs == {"17": running, "18": pending}
    assert asked == ["18", "19"]


def test_a_controller_that_gives_no_answer_about_a_job_does_not_forget_it(tmp_path, monkeypatch):
    said = "Munge encode failed\nslurm_load_jobs error: Protocol authentication error"
    for text in said, "slurm_load_jobs error: Socket closed":
        (tmp_path / "scontrol").write_text(f"#!/bin/bash\necho '{text}' >&2; exit 1\n")
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with pytest.raises(SlurmUnreachable):
            slurm.details("7")


def test_what_users_write_is_no_field_of_a_job_and_breaks_no_answer(tmp_path, monkeypatch, caplog):
    answers = {
        "squeue": "echo '7|7|N/A|RUNNING|None|n1|1:00|1:00|N/A|run|1'; echo $* >> $0.asked",
        "scontrol": "printf 'JobId=7 JobName=a Restarts=9\\n   Requeue=1 Restarts=0\\n"
        "   Comment=by policy Requeue=0 Restarts=7\\n Restarts=8\\n   StdOut=/x\\n'",
        "sacct": "echo 'sacct: error: Connection refused' >&2; exit 1",
    }
    for name, line in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    queue = ask(["7", "8,9", "8\n9", "10_2"])
    assert queue.jobs["7"].name == "run|1"
    assert "-j 7,10_2\n" in (tmp_path / "squeue.asked").read_text()
    assert slurm.details("7") == {"JobId": "7", "Requeue": "1", "Restarts": "0", "StdOut": "/x"}
    (warning,) = caplog.messages
    assert "sacct gets no answer" in warning
