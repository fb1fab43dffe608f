from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from data_pipeline.errors import EXIT_INTERRUPTED
from data_pipeline.patience import Patience
from launcher.commands.local import change_of_ranks, starter
from launcher.restart_policy import RestartPolicy
from launcher.status.run_state import read_state
from launcher.supervisor import Ranks, StopSignals, supervise
from pretrain.config.run import RunConfig
from pretrain.rundir.exit_status import EXIT_STOPPED
from pretrain.rundir.launch_events import AttemptEnded
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Started


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(tmp_path / "run", RunConfig(name="books"))
    run_dir.ledger.append(Started(step=0, world_size=1))
    return run_dir


def test_a_start_with_another_number_of_ranks_is_noted(run_dir, tmp_path):
    assert change_of_ranks(run_dir, 1) == ""
    assert change_of_ranks(RunDir(tmp_path / "new"), 2) == ""
    run_dir.ledger.append(Started(step=0, world_size=2))
    assert change_of_ranks(run_dir, 2) == ""
    assert change_of_ranks(run_dir, 1).endswith("resumes on 1 rank and had 2 before (--ranks=2)")


def stop_at_the_first_failure(run_dir: RunDir, stop: StopSignals) -> None:
    deadline = time.monotonic() + 30
    while not any(isinstance(event, AttemptEnded) for event in run_dir.ledger.read()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stop.received.append(signal.SIGINT)
    stop.requests += 1


def test_a_supervisor_outlasts_a_disk_that_is_full_before_and_after_an_attempt(
    run_dir, monkeypatch
):
    monkeypatch.setattr("data_pipeline.patience.FIRST_PAUSE", 0.05)
    limits, waited = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def fill_the_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))

    def make_room() -> None:
        waited.append(len(run_dir.ledger.read()))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def start(number: int) -> Ranks:
        fill_the_disk()
        return starter(["true"], 1, run_dir)(number)

    patient = RunDir(run_dir.path, Patience(60, make_room))
    fill_the_disk()
    try:
        status = supervise(patient, start, RestartPolicy(), StopSignals())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 0
    assert waited == [1, 1], "before the attempt, and until its end is written"
    assert isinstance(run_dir.ledger.read()[-1], AttemptEnded)


@pytest.mark.parametrize("job", [None, "17"])
def test_ctrl_c_while_a_failed_run_waits_for_its_next_attempt_is_a_stop(run_dir, job, caplog):
    caplog.set_level("INFO")
    stop = StopSignals()
    fails = starter([sys.executable, "-I", "-S", "-c", "raise SystemExit(1)"], 1, run_dir)
    threading.Thread(target=stop_at_the_first_failure, args=(run_dir, stop)).start()
    status = supervise(run_dir, fails, RestartPolicy(first_delay=60.0), stop, job=job)
    assert status == (EXIT_STOPPED if job else EXIT_INTERRUPTED)
    said = caplog.messages[-1]
    assert said.startswith("stopped before the first checkpoint; nothing was saved")
    assert ("rerun the same command" in said) == (job is None)
    if job is None:
        state = read_state(run_dir.path)
        assert (state.state, state.reason) == ("stopped", "stopped by Ctrl-C; nothing is saved")
        assert not state.is_lost


def test_ctrl_c_before_the_ranks_are_up_promises_no_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO")
    stop, new = StopSignals(), RunDir(tmp_path / "new")
    stop.requests = 1
    sleeps = starter(["sleep", "60"], 1, new)
    assert supervise(new, sleeps, RestartPolicy(), stop) == EXIT_INTERRUPTED
    assert caplog.messages[-1] == (
        "stopped before the first step; nothing was saved; rerun the same command to start again"
    )
