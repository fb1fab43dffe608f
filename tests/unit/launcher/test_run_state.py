from __future__ import annotations

import datetime
import json
import os
import socket

import pytest

from launcher.status.journal import last_failure, last_job, num_attempts, without_refused_jobs
from launcher.status.liveness import Beat, Lock, Measured, read_beats, read_lock, read_measured
from launcher.status.run_state import read_state
from launcher.status.run_status import SILENT_SECONDS, Evidence, goodput, judge
from pretrain.config.run import RunConfig
from pretrain.rundir.run_dir import RunDir

NOW = 1_700_000_000.0
ENDED = "attempt_ended"


def event(kind: str, seconds_ago: float = 0.0, **more) -> dict:
    time = datetime.datetime.fromtimestamp(NOW - seconds_ago, datetime.timezone.utc).isoformat()
    return {"event": kind, "time": time, **more}


def beat(seconds_ago: float, host: str = "elsewhere", phase: str = "train", pid: int = 1) -> Beat:
    return Beat(time=NOW - seconds_ago, step=7, phase=phase, host=host, pid=pid)


def evidence(
    *ledger: dict, beats=(), locks=(), checkpoint=None, steps=100, measured=None
) -> Evidence:
    return Evidence(
        now=NOW,
        ledger=ledger,
        measured=measured or Measured(),
        beats=beats,
        locks=locks,
        checkpoint=checkpoint,
        checkpoint_time=None,
        steps=steps,
    )


HELD = Lock(pid=1, host="here", since=NOW - 100, is_held=True)
LEFT = Lock(pid=1, host="here", since=NOW - 100, is_held=False)
RETRY = event(ENDED, next="retry", reason="rank 1 was ended by SIGKILL", step=40)
GIVEN_UP = event(ENDED, next="give up", reason="3 in a row")
START = event("start", 100)
REFUSED = event(ENDED, next="refused", reason="a setting has to change")
GAVE_UP = event("gave_up", 1, reason="a loss spike")
JOB_STARTED = event("job_started", -1, job="17", restart=1, hosts=["n1", "n2"], step=40)
SUBMITTED = event("submitted", -1, job="17")
CANCELLED = event("cancelled", 20, job="17")
LATE_START = event("start", 10, attempt="17.0.0.a1b2")
STOP = event("stop", step=1)


def job_ended(why: str, requeued: bool, **more: str) -> dict:
    return event("job_ended", job="17", restart=0, why=why, requeued=requeued, **more)


def elsewhere(seconds_ago: float) -> Lock:
    return Lock(pid=1, host="n1", since=NOW - seconds_ago, is_held=None)


@pytest.mark.parametrize(
    ("found", "state", "why"),
    [
        (evidence(), "new", "no attempt has begun"),
        (evidence(START, locks=[HELD]), "running", ""),
        (evidence(START, beats=[beat(5)]), "running", ""),
        (evidence(START, beats=[beat(5, phase="save")]), "running", "saving a checkpoint"),
        (evidence(START, beats=[beat(5), beat(SILENT_SECONDS + 60)], locks=[HELD]), "running", ""),
        (evidence(START, beats=[beat(360)], locks=[HELD]), "running", "no progress for 6.0 min"),
        (
            evidence(START, beats=[beat(360)]),
            "silent",
            "no sign of life from elsewhere for 6.0 min",
        ),
        (
            evidence(START, RETRY, locks=[HELD]),
            "running",
            "starting again: rank 1 was ended by SIGKILL",
        ),
        (evidence(START), "failed", "ended without a word"),
        (
            evidence(START, beats=[beat(5, host=socket.gethostname(), pid=2**22 + 1)]),
            "failed",
            "ended without a word",
        ),
        (evidence(START, RETRY, locks=[LEFT]), "failed", "ended without a word"),
        (evidence(locks=[elsewhere(20)]), "running", "starting"),
        (
            evidence(START, RETRY, locks=[elsewhere(20)]),
            "running",
            "starting again: rank 1 was ended by SIGKILL",
        ),
        (
            evidence(START, RETRY, locks=[elsewhere(400)]),
            "silent",
            "no sign of life from n1 for 6.7 min",
        ),
        (
            evidence(START, GIVEN_UP, locks=[elsewhere(20)], beats=[beat(30)]),
            "failed",
            "3 in a row",
        ),
        (evidence(START, GIVEN_UP), "failed", "3 in a row"),
        (evidence(START, REFUSED), "failed", "a setting"),
        (
            evidence(START, event(ENDED, next="stopped", step=1200)),
            "stopped",
            "on request after step 1,200",
        ),
        (evidence(SUBMITTED), "queued", "not begun since"),
        (evidence(START, GIVEN_UP, SUBMITTED), "queued", "not begun since"),
        (evidence(event("submitted", 200, job="17"), START, GIVEN_UP), "failed", "3 in a row"),
        (
            evidence(START, CANCELLED, event(ENDED, next="stopped"), checkpoint=40),
            "cancelled",
            "after step 40",
        ),
        (evidence(CANCELLED, event("submitted", -1)), "queued", "not begun since"),
        (evidence(START, job_ended("preempted", True)), "preempted", "preempted"),
        (evidence(START, job_ended("time limit", True)), "requeued", "time limit"),
        (evidence(START, job_ended("host n2 failed", False)), "requeued", "host n2 failed"),
        (
            evidence(START, job_ended("cancelled", False), checkpoint=40),
            "cancelled",
            "after step 40",
        ),
        (
            evidence(JOB_STARTED, job_ended("cancelled", False), LATE_START, STOP, checkpoint=1),
            "cancelled",
            "after step 1",
        ),
        (
            evidence(JOB_STARTED, CANCELLED, LATE_START, STOP, checkpoint=1),
            "cancelled",
            "after step 1",
        ),
        (
            evidence(JOB_STARTED, job_ended("n2 sees nothing", False, next="give up")),
            "failed",
            "n2 sees nothing",
        ),
        (evidence(START, GIVEN_UP, job_ended("gave up or refused", False)), "failed", "3 in a row"),
        (
            evidence(START, GAVE_UP, REFUSED, job_ended("gave up or refused", False)),
            "failed",
            "a loss spike",
        ),
        (
            evidence(START, job_ended("time limit", True), JOB_STARTED, locks=[elsewhere(9)]),
            "running",
            "starting",
        ),
        (evidence(START, event("stop", step=12)), "stopped", "on request after step 12"),
        (evidence(START, event("finish", step=100), checkpoint=100), "done", ""),
        (
            evidence(START, event("finish"), event(ENDED, next="finished"), checkpoint=100),
            "done",
            "",
        ),
        (
            evidence(START, event("finish"), checkpoint=100, steps=150),
            "stopped",
            "now asks for 150",
        ),
    ],
)
def test_the_state_follows_from_what_the_directory_shows(found, state, why):
    said = judge(found)
    assert said[0] == state
    assert why in said[1]
    assert bool(why) == bool(said[1])


def test_attempts_are_starts_and_those_that_ended_before_one():
    begun = [START, RETRY, event("resume"), RETRY]
    assert num_attempts(begun, is_running=False) == 2
    assert num_attempts([*begun, RETRY], is_running=False) == 3
    assert num_attempts(begun, is_running=True) == 3
    assert num_attempts([*begun, event("resume")], is_running=True) == 3


def test_trouble_is_told_in_words_and_a_second_job_that_was_refused_is_none():
    lost = job_ended("host n2 failed", True)
    assert last_failure([START, lost]) == ("host n2 failed", NOW)
    assert last_failure([START, RETRY, job_ended("finished", False)]) == (
        "rank 1 was ended by SIGKILL",
        NOW,
    )
    assert last_failure([START, event("finish")]) is None
    second = [
        event("job_started", job="18"),
        job_ended("refused: job 17 has the run", False) | {"job": "18"},
    ]
    ledger = [event("submitted", job="17"), START, *second]
    assert without_refused_jobs(ledger) == ledger[:2]
    assert last_job(without_refused_jobs(ledger)) == "17"


def test_goodput_counts_waiting_after_failures_but_not_time_stopped_on_request_or_in_the_queue():
    measured = Measured(seconds=30.0)
    running = evidence(event("start", 60), RETRY, event("resume", 10), measured=measured)
    assert goodput(running, is_running=True) == pytest.approx(0.5)
    stopped = [event("start", 1000), event("stop", 960), event("resume", 20)]
    assert goodput(evidence(*stopped, measured=measured), is_running=True) == pytest.approx(0.5)
    assert goodput(
        evidence(*stopped, event("finish"), measured=measured), is_running=False
    ) == pytest.approx(0.5)
    preempted = job_ended("preempted", True) | {"time": event("", 80)["time"]}
    queue = evidence(
        event("start", 100),
        preempted,
        event("job_started", 40),
        event("resume", 30),
        measured=measured,
    )
    assert goodput(queue, is_running=True) == pytest.approx(0.5)
    killed = evidence(event("start", 100), beats=[beat(40)], measured=measured)
    assert goodput(killed, is_running=False) == pytest.approx(0.5)
    assert goodput(evidence(), is_running=False) is None


def test_intervals_are_summed_and_the_last_loss_is_found_before_steps_without_one_and_lines_cut_short(
    tmp_path,
):
    lines = [{"kind": "train", "step": step, "loss": 9.0 - step} for step in range(1, 5)]
    lines[1] |= {"seconds": 2.0, "tokens_per_second": 100.0}
    lines[3] |= {"seconds": 3.0, "tokens_per_second": 300.0}
    lines[3]["loss"] = None
    lines.append({"kind": "evaluation", "step": 4, "loss": 1.0, "tokens_per_second": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "train", "step": 5, "lo'
    )
    assert read_measured(path) == Measured(step=4, loss=6.0, tokens_per_second=200.0, seconds=5.0)
    assert read_measured(tmp_path / "nothing") == Measured()


def test_a_damaged_heartbeat_is_passed_over(tmp_path):
    (tmp_path / "rank-00000.json").write_text("{")
    (tmp_path / "rank-00001.json").write_text(
        '{"time": 1.5, "step": 3, "phase": "train", "host": "n1", "pid": 4}'
    )
    assert read_beats(tmp_path) == [Beat(time=1.5, step=3, phase="train", host="n1", pid=4)]


def test_a_lock_names_its_holder_and_whether_it_is_still_held(tmp_path):
    path = tmp_path / "launcher.lock"
    assert read_lock(path) is None
    with RunDir(tmp_path).locked("launcher"):
        held = read_lock(path)
    left = read_lock(path)
    assert held is not None
    assert left is not None
    assert (held.pid, held.host, held.is_held, left.is_held) == (
        os.getpid(),
        socket.gethostname(),
        True,
        False,
    )
    path.write_text("process 17 (launcher) on another-host\n")
    foreign = read_lock(path)
    assert foreign is not None
    assert (foreign.host, foreign.is_held) == ("another-host", None)


def test_a_directory_is_read_as_a_whole(tmp_path):
    run_dir = RunDir.create(tmp_path / "run", RunConfig(name="books"))
    run_dir.append_ledger({"event": "start", "step": 0, "world_size": 2})
    run_dir.append_ledger(
        {"event": ENDED, "next": "retry", "reason": "rank 1 was ended by SIGKILL", "step": 10}
    )
    run_dir.append_ledger({"event": "resume", "step": 10, "world_size": 2})
    line = {"kind": "train", "step": 12, "loss": 3.5, "tokens_per_second": 1e3, "seconds": 1e-3}
    run_dir.metrics.write_text(json.dumps(line) + "\n")
    marker = run_dir.checkpoints / "step-00000010" / "COMPLETE"
    marker.parent.mkdir()
    marker.touch()
    with run_dir.locked("launcher"):
        state = read_state(run_dir.path)
    assert (state.name, state.state, state.attempts, state.ranks) == ("books", "running", 2, 2)
    assert (state.step, state.loss, state.checkpoint) == (12, 3.5, 10)
    config = run_dir.config
    assert state.seconds_left == pytest.approx(
        (config.optim.steps - 12) * config.tokens_per_step / 1e3
    )
    assert state.last_failure == "rank 1 was ended by SIGKILL"
    assert state.checkpoint_age is not None
    assert state.checkpoint_age < 60
