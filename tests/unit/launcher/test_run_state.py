"""The state that follows from a run's directory, also where it contradicts itself."""

import json
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.run_state import read_state
from launcher.run_status import Evidence, infer_status
from pretrain.checkpoint.directory import step_directory
from pretrain.config.run import RunConfig
from pretrain.rundir.attempt_files import AttemptStart
from pretrain.rundir.events import (
    AttemptReason,
    Canceled,
    Event,
    GaveUp,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    NodesUnready,
    Outcome,
    Spike,
    Submitted,
    TrainingBegan,
    TrainingEnded,
    UnresolvedSpike,
)
from pretrain.rundir.heartbeat import HeartbeatRecord
from pretrain.rundir.lock import Lock
from pretrain.rundir.metrics_file import MetricsSummary, TimeSpent
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.jobs import attempt_ended, write_ledger
from tests.helpers.metrics import train_line

NOW = 1_700_000_000.0


def beat(seconds_ago: float, since_written: float | None = None, **more: Any) -> HeartbeatRecord:
    time = NOW - seconds_ago
    written = time if since_written is None else NOW - since_written
    usual = {"rank": 0, "step": 7, "phase": "train", "hostname": "elsewhere", "pid": 1}
    return HeartbeatRecord(**{**usual, "time": time, "written": written, **more})


def seen(*ledger: Event, beats=(), **more: Any) -> Evidence:
    usual = {"metrics": MetricsSummary(), "locks": (), "checkpoint": None, "steps": 100}
    more = {**usual, "checkpoint_time": None, **more}
    return Evidence(now=NOW, ledger=ledger, heartbeats=beats, **more)


HELD = Lock(pid=1, holder="train", hostname="here", since=NOW - 100, is_held=True)
LEFT = replace(HELD, is_held=False)
KILLED = "rank 1 was killed by SIGKILL"
RETRY = attempt_ended(time=NOW, step=40, without_progress=3)
GIVEN_UP = replace(RETRY, next=NextAction.GIVE_UP)
START = TrainingBegan(time=NOW - 100, step=0, world_size=2)
REFUSED = replace(RETRY, next=NextAction.REFUSED, reason=AttemptReason.USER_ERROR)
STOPPED = replace(RETRY, next=NextAction.STOPPED, reason=AttemptReason.STOP_REQUESTED, step=1200)
GAVE_UP = GaveUp(time=NOW - 1, spike=Spike(8, 9, 9.0, 3.0))
UNRESOLVED = UnresolvedSpike(time=NOW - 1, spike=GAVE_UP.spike)
JOB_STARTED = JobStarted(time=NOW + 1, job="17", restart=1, nodes=("n1", "n2"), step=40)
SUBMITTED = Submitted(time=NOW + 1, job="17")
CANCELED = Canceled(time=NOW - 20, job="17")
LATE_START = TrainingBegan(time=NOW - 10, step=0, world_size=2, attempt="17.0.0.a1b2")
STOP = TrainingEnded(outcome=Outcome.STOPPED, time=NOW, step=1)
FINISH = TrainingEnded(outcome=Outcome.FINISHED, time=NOW, step=100)


def job_ended(reason: JobEndReason, requeued: bool = False, **more: Any) -> JobEnded:
    return JobEnded(time=NOW, job="17", restart=0, reason=reason, requeued=requeued, **more)


PREEMPTED = job_ended(JobEndReason.PREEMPTED, True)
TIME_LIMIT = job_ended(JobEndReason.TIME_LIMIT, True)
JOB_CANCELED = job_ended(JobEndReason.CANCELED)
JOB_GAVE_UP = job_ended(JobEndReason.GAVE_UP)
NODE_FAILED = job_ended(JobEndReason.NODE_FAILED, node="n2")
BLIND = job_ended(JobEndReason.ERROR, message="n2 sees nothing")
UNREADY = NodesUnready(time=NOW, job="17", problems={"n2": "does not respond"})
STARTED = AttemptStart(time=NOW - 30, nodes=("n1", "n2"))
EARLIER = replace(JOB_STARTED, time=NOW - 180)
DEAD = beat(5, hostname=socket.gethostname(), pid=2**22 + 1)


def finished(**more: Any) -> Evidence:
    """As an older version has called it."""
    return seen(START, FINISH, checkpoint=100, metrics=MetricsSummary(step=100, **more))


def final(ended: JobEnded) -> JobEnded:
    return replace(ended, requeued=False, is_final=True)


def elsewhere(seconds_ago: float) -> Lock:
    return replace(HELD, hostname="n1", since=NOW - seconds_ago, is_held=None)


@pytest.mark.parametrize(
    ("found", "state", "reason"),
    [
        (seen(), "new", "no attempt yet"),
        (seen(START, locks=[HELD]), "running", ""),
        (seen(START, beats=[beat(5)]), "running", ""),
        (seen(START, beats=[beat(5, phase="save")]), "running", "saving a checkpoint"),
        (seen(START, beats=[beat(5), beat(360)], locks=[HELD]), "running", ""),
        (seen(START, beats=[beat(360, since_written=3)], locks=[HELD]), "running", "for 6.0 min"),
        (seen(START, beats=[beat(360)]), "unresponsive", "no heartbeat from elsewhere for 6.0 min"),
        (seen(START, RETRY, locks=[HELD]), "running", f"restarting: {KILLED}"),
        (seen(START), "failed", "ended silently"),
        (seen(START, beats=[DEAD]), "failed", "ended silently"),
        (seen(START, RETRY, locks=[LEFT]), "failed", "ended silently"),
        (seen(locks=[elsewhere(20)]), "running", "starting"),
        (seen(START, RETRY, locks=[elsewhere(400)]), "unresponsive", "from n1 for 6.7 min"),
        (seen(START, GIVEN_UP, locks=[elsewhere(20)], beats=[beat(30)]), "failed", "3 attempts"),
        (seen(START, REFUSED), "failed", "a setting"),
        (seen(START, STOPPED), "stopped", "on request after step 1,200"),
        (seen(SUBMITTED), "queued", "not started since"),
        (seen(replace(SUBMITTED, time=NOW - 200), START, GIVEN_UP), "failed", "3 attempts"),
        (seen(START, CANCELED, STOPPED, checkpoint=40), "canceled", "after step 40"),
        (seen(CANCELED, SUBMITTED), "queued", "not started since"),
        (seen(START, PREEMPTED), "preempted", "preempted"),
        (seen(START, TIME_LIMIT), "requeued", "time limit"),
        (seen(START, final(PREEMPTED)), "preempted", "not requeued; 'launcher resume' continues"),
        (seen(START, final(TIME_LIMIT)), "stopped", "not requeued; 'launcher resume' continues"),
        (seen(START, NODE_FAILED), "requeued", "node n2 failed"),
        (seen(START, JOB_CANCELED, checkpoint=40), "canceled", "after step 40"),
        (seen(JOB_STARTED, JOB_CANCELED, LATE_START, STOP, checkpoint=1), "canceled", "step 1"),
        (seen(JOB_STARTED, CANCELED, LATE_START, STOP, checkpoint=1), "canceled", "after step 1"),
        (seen(JOB_STARTED, BLIND), "failed", "n2 sees nothing"),
        (seen(START, GIVEN_UP, JOB_GAVE_UP), "failed", "3 attempts in a row"),
        (seen(START, GAVE_UP, REFUSED, JOB_GAVE_UP), "failed", "losses up to 9.000"),
        (seen(START, TIME_LIMIT, JOB_STARTED, locks=[elsewhere(9)]), "running", "starting"),
        (seen(START, replace(STOP, step=12)), "stopped", "on request after step 12"),
        (seen(START, FINISH, checkpoint=100), "done", ""),
        (
            seen(JOB_STARTED, UNREADY, locks=[elsewhere(9)]),
            "running",
            "waiting: n2 does not respond",
        ),
        (
            seen(JOB_STARTED, UNREADY, locks=[elsewhere(999)]),
            "unresponsive",
            "waiting: n2 does not",
        ),
        (
            seen(JOB_STARTED, replace(UNREADY, time=NOW - 99), start=STARTED, locks=[elsewhere(9)]),
            "running",
            "starting for 30 s",
        ),
        (seen(EARLIER, locks=[elsewhere(9)]), "running", "starting for 3.0 min"),
        (
            seen(START, beats=[beat(-400)]),
            "unresponsive",
            "the clock of elsewhere is 6.7 min ahead",
        ),
        (seen(START, GAVE_UP), "failed", "losses up to 9.000"),  # by a rank without a launcher
        (seen(START, UNRESOLVED, FINISH, checkpoint=100), "done", "ended while steps 8 to 9 had"),
        (seen(START, UNRESOLVED, START, FINISH, checkpoint=100), "done", ""),
        (finished(num_skipped_last=2), "failed", "2 updates"),
        (finished(evaluation={"step": 100, "loss": None}), "failed", "not finite"),
        (finished(evaluation={"step": 90, "loss": None}), "done", ""),
        (seen(START, FINISH, checkpoint=100, steps=150), "stopped", "the run now has 150 steps"),
    ],
)
def test_the_state_follows_from_what_the_directory_shows(found, state, reason):
    status = infer_status(found)
    assert status.state == state
    assert reason in status.reason
    assert bool(reason) == bool(status.reason)


def goodput_of(found: Evidence, is_running: bool) -> float:
    spent = found.time_spent(is_running)
    assert spent is not None
    return spent.goodput


def test_goodput_counts_waiting_after_failures_but_not_time_stopped_on_request_or_in_the_queue():
    metrics = MetricsSummary(spent=TimeSpent(training=30.0))

    def begun(seconds_ago: float) -> TrainingBegan:
        return replace(START, time=NOW - seconds_ago)

    running = seen(begun(60), RETRY, begun(10), metrics=metrics)
    assert goodput_of(running, is_running=True) == pytest.approx(0.5)
    stopped = [begun(1000), replace(STOP, time=NOW - 960), begun(20)]
    assert goodput_of(seen(*stopped, metrics=metrics), is_running=True) == pytest.approx(0.5)
    finished = seen(*stopped, FINISH, metrics=metrics)
    assert goodput_of(finished, is_running=False) == pytest.approx(0.5)
    waited = [replace(PREEMPTED, time=NOW - 80), replace(JOB_STARTED, time=NOW - 40)]
    queue = seen(begun(100), *waited, begun(30), metrics=metrics)
    assert goodput_of(queue, is_running=True) == pytest.approx(0.5)
    killed = seen(begun(100), beats=[beat(40)], metrics=metrics)
    assert goodput_of(killed, is_running=False) == pytest.approx(0.5)
    # Our clock is ten minutes ahead of the run's host, whose heartbeat tells of a standstill.
    alive = seen(begun(660), beats=[beat(630, since_written=600)], metrics=metrics)
    alive = replace(alive, checkpoint_time=NOW)  # by the clock of the file server
    assert goodput_of(alive, is_running=True) == pytest.approx(0.5)
    assert seen().time_spent(is_running=False) is None
    unmeasured = seen(begun(90), metrics=replace(metrics, time=NOW - 30))  # storage is away
    assert goodput_of(unmeasured, is_running=True) == pytest.approx(0.5)


def test_the_time_of_a_run_is_told_apart_and_adds_up():
    parts = {"training": 27, "waiting_for_data": 3, "evaluation": 5, "saving": 2, "stalls": 4}
    metrics = MetricsSummary(spent=TimeSpent(**parts))
    stopped = [replace(START, time=NOW - 1000), replace(STOP, time=NOW - 960)]
    spent = seen(*stopped, replace(START, time=NOW - 20), metrics=metrics).time_spent(True)
    assert spent is not None
    assert vars(spent) == pytest.approx({**parts, "restarts": 19})
    assert (spent.total, spent.goodput) == (pytest.approx(60), pytest.approx(0.45))
    assert spent.description.split("%")[:2] == ["training 45.0", ", restarts 31.7"]


def test_a_directory_is_read_as_a_whole(run_dir):
    run_dir.ledger.append(TrainingBegan(step=0, world_size=2))
    run_dir.ledger.append(attempt_ended())
    run_dir.ledger.append(TrainingBegan(step=10, world_size=2))
    line = train_line(12, 3.5, train_loss=3.25, tokens_per_second=1e3, seconds=1e-3)
    run_dir.metrics.write_text(json.dumps(line) + "\n")
    publish_step(run_dir.checkpoints, 10)
    with run_dir.locked("launcher"):
        state = read_state(run_dir.path)
    assert (state.name, state.state, state.attempts, state.ranks) == ("books", "running", 2, 2)
    assert (state.step, state.results.train_loss, state.checkpoint) == (12, 3.25, 10)
    tokens_left = (run_dir.config.optim.steps - 12) * run_dir.config.tokens_per_step
    assert state.seconds_left == pytest.approx(tokens_left / 1e3)
    assert state.last_failure == KILLED
    assert state.checkpoint_age is not None
    assert state.checkpoint_age < 60


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", RunConfig(name="books"))


def test_what_is_saved_is_what_checkpoints_say_not_measurements(run_dir):
    interval = run_dir.config.checkpoint.interval
    run_dir.ledger.append(TrainingBegan(step=0, world_size=2))
    last = 2 * interval + 3
    run_dir.metrics.write_text(json.dumps(train_line(last)) + "\n")
    assert str(last) in read_state(run_dir.path).unsaved
    for step in (interval, 2 * interval):
        publish_step(run_dir.checkpoints, step)
    assert not read_state(run_dir.path).unsaved
    shutil.rmtree(step_directory(run_dir.checkpoints, 2 * interval))
    assert f"step {interval} of {last}" in read_state(run_dir.path).unsaved


def test_the_last_failure_is_no_planned_end_and_lies_in_no_future(run_dir):
    run_dir.ledger.append(TrainingBegan(step=0, world_size=2))
    run_dir.ledger.append(attempt_ended())
    for reason in (JobEndReason.PREEMPTED, JobEndReason.TIME_LIMIT_NEAR):
        run_dir.ledger.append(job_ended(reason, True))
    state = read_state(run_dir.path)
    assert state.last_failure == KILLED
    assert state.last_failure_age is not None
    assert state.last_failure_age >= 0


def test_times_of_clocks_that_differ_make_no_negative_or_absurd_durations(run_dir, caplog):
    line = train_line(5, tokens_per_second=1.0, seconds=40.0)
    run_dir.metrics.write_text(json.dumps(line) + "\n")
    now = time.time()
    events = (
        (GaveUp(spike=Spike(8, 9, 9.0, 3.0)), 110),
        (TrainingBegan(step=0, world_size=2), 100),
        (attempt_ended(), 5000),  # a clock behind
        (TrainingBegan(step=4, world_size=2), 60),
        (attempt_ended(NextAction.GIVE_UP), -86400),  # a clock ahead
    )
    write_ledger(run_dir, *(replace(event, time=now - ago) for event, ago in events))
    state = read_state(run_dir.path)
    assert state.results.goodput == pytest.approx(0.4, abs=0.02)
    assert state.last_failure_age == pytest.approx(0, abs=30)
    (note,) = caplog.messages
    assert "2 events" in note
