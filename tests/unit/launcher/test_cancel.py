"""`launcher cancel` and `launcher resume` where no Slurm has the run; with Slurm: tests/slurm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from pretrain.config.run import RunConfig
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Finished
from tests.helpers.metrics import train_line

# Stands for a launcher: holds its lock until it is asked to stop, and then notes that it did.
HOLDER = """
import signal, sys
from pathlib import Path
from pretrain.rundir.launch_events import AttemptEnded, AttemptReason, NextAction
from pretrain.rundir.run_dir import RunDir
run = RunDir(Path(sys.argv[1]))
def stop(*_):
    run.ledger.append(AttemptEnded(attempt_number=0, statuses=(75,), step_before=0, step=40,
        reason=AttemptReason.STOP_REQUESTED, next=NextAction.STOPPED))
    sys.exit()
signal.signal(signal.SIGTERM, stop)
with run.locked("launcher"):
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", RunConfig())


def test_cancelling_asks_the_launcher_to_save_and_stop_and_waits_for_it(run_dir, capsys):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir.path)], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert main(["resume", str(run_dir.path)]) == 2
    assert "is running" in capsys.readouterr().err
    assert main(["cancel", str(run_dir.path)]) == 0
    output = capsys.readouterr().out
    assert f"asking process {holder.pid}" in output
    assert "stopped on request after step 40" in output
    assert f"launcher resume {run_dir.path}" in output
    assert holder.wait(10) == 0


def test_what_is_not_running_is_not_cancelled(run_dir, capsys):
    assert main(["cancel", str(run_dir.path)]) == 2
    assert "is not running (new: no attempt yet)" in capsys.readouterr().err


def test_a_run_of_another_host_is_cancelled_there(run_dir, capsys):
    (run_dir.path / "launcher.lock").write_text(
        '{"pid": 17, "holder": "launcher", "hostname": "n3"}'
    )
    assert main(["cancel", str(run_dir.path)]) == 2
    assert "is run by process 17 on n3; cancel it there" in capsys.readouterr().err


def test_a_finished_run_is_not_resumed(run_dir, capsys):
    steps = run_dir.config.optim.steps
    run_dir.metrics.write_text(json.dumps(train_line(steps)) + "\n")
    run_dir.ledger.append(Finished(step=steps))
    assert main(["resume", str(run_dir.path)]) == 2
    assert f"is done after step {steps:,}; to train further" in capsys.readouterr().err
