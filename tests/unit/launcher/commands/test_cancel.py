"""`launcher cancel`, `signal` and `resume` where no Slurm has the run; with Slurm: tests/slurm."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.corpora.corpus_identity import VALIDATION, split_hash, tokenizer_of
from foundation.errors import ConfigError
from launcher.cli import main
from launcher.commands.cancel import _way_back
from launcher.commands.resume import course_at
from launcher.run_state import RunState
from launcher.run_status import State
from launcher.slurm.sbatch import Snapshot, is_script_of, render
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import RunConfig
from pretrain.rundir.events import (
    Canceled,
    JobStarted,
    Outcome,
    Published,
    Requested,
    Submitted,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.full_disk import full_disk
from tests.helpers.jobs import fake_commands, job_of, listed
from tests.helpers.metrics import train_line
from tests.helpers.owners import give_away

# Stands for a launcher: holds its lock until it is asked to stop, and then notes that it did.
HOLDER = """
import signal, sys
from pathlib import Path
from pretrain.rundir.events import AttemptEnded, AttemptReason, NextAction
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
    command = [sys.executable, "-c", HOLDER, str(run_dir.path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert main(["resume", str(run_dir.path)]) == 2
    assert str(run_dir.path) in capsys.readouterr().err
    assert main(["cancel", str(run_dir.path)]) == 0
    output = capsys.readouterr().out
    assert f"process {holder.pid}" in output
    assert "step 40" in output
    assert f"launcher resume {run_dir.path}" in output
    assert holder.wait(10) == 0


JOB = "7|7|N/A|RUNNING|None|n1|N/A|{}"
CANCEL = ': > "$0.$1"'


def test_a_job_is_cancelled_although_no_ledger_is_writable(run_dir, tmp_path, monkeypatch, capsys):
    queue = listed(JOB.format(Snapshot(run_dir.path).code))
    fake_commands(tmp_path, monkeypatch, squeue=queue, scancel=CANCEL)
    run_dir.ledger.append(Submitted(job="7"))
    with full_disk():
        assert main(["cancel", str(run_dir.path)]) == 0
    assert (tmp_path / "scancel.7").exists()
    said = capsys.readouterr()
    assert f"{run_dir.ledger.path}: " in said.err
    assert said.out.startswith("job 7 ")


SAY = 'echo "${0##*/} $*" >> "${0%/*}/said"'


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("save", ["scancel --signal=URG 7"]),
        ("evaluate", ["scancel --signal=URG 7"]),
        ("stop", ["scontrol update JobId=7 Requeue=0", "scancel --batch --signal=TERM 7"]),
    ],
)
def test_a_request_reaches_the_ranks_or_the_supervisor_of_a_job(
    run_dir, tmp_path, monkeypatch, request_, said
):
    """Without its files but for the ledger, which says what is asked for."""
    queue = listed(JOB.format(Snapshot(run_dir.path).code))
    fake_commands(tmp_path, monkeypatch, squeue=queue, scancel=SAY, scontrol=SAY)
    run_dir.ledger.append(Submitted(job="7"))
    assert main(["signal", str(run_dir.path), request_]) == 0
    assert (tmp_path / "said").read_text().splitlines() == said
    requests = [event.request for event in find_events(run_dir.ledger.read(), Requested)]
    assert requests == ([] if request_ == "stop" else [request_])


@pytest.mark.parametrize("request_", ["save", "stop"])
def test_nothing_is_asked_of_a_run_that_does_not_run(run_dir, capsys, request_):
    assert main(["signal", str(run_dir.path), request_]) == 2
    assert "is not running (new: no attempt yet); nothing to ask" in capsys.readouterr().err
    assert run_dir.ledger.read() == []


@pytest.mark.parametrize("work_dir", ["/runs/here", ""])
def test_a_job_that_works_elsewhere_is_not_canceled(
    run_dir, tmp_path, monkeypatch, capsys, work_dir
):
    fake_commands(tmp_path, monkeypatch, squeue=listed(JOB.format("/home/me")), scancel=CANCEL)
    run_dir.ledger.append(Submitted(job="7", work_dir=work_dir))
    assert main(["cancel", str(run_dir.path)]) == 2
    assert "'/home/me'" in capsys.readouterr().err
    assert not (tmp_path / "scancel.7").exists()


def test_a_process_that_does_not_hold_the_lock_is_not_signaled(run_dir, capsys):
    """The lock's file names a bystander."""
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        names = {"pid": bystander.pid, "holder": "train", "hostname": socket.gethostname()}
        (run_dir.path / "train.lock").write_text(json.dumps(names))
        assert main(["cancel", str(run_dir.path)]) == 2
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("resume", name) for name in ("ledger.jsonl", "slurm", "slurm/job.sbatch")),
        *(("cancel", name) for name in (".", "config.yaml")),
        *(("local", name) for name in (".", "slurm/job.sbatch")),
    ],
)
def test_what_another_user_can_write_is_not_obeyed(run_dir, capsys, monkeypatch, command, name):
    experiment = run_dir.path.parent / "experiment.yaml"
    experiment.write_text("name: x\n")
    before = ["local", str(experiment), "--run-dir"] if command == "local" else [command]
    run_dir.ledger.append(Submitted(job="1", job_name="run-1"))
    Snapshot(run_dir.path).take_code("#!/bin/sh\n")
    Snapshot(run_dir.path).path.chmod(0o755)  # what is in a private directory is out of reach
    path = run_dir.path / name
    path.chmod(path.stat().st_mode | 0o020)
    assert main([*before, str(run_dir.path)]) == 2
    assert f"error: {path} " in capsys.readouterr().err
    path.chmod(path.stat().st_mode & 0o755)
    give_away(path, monkeypatch)
    assert main([*before, str(run_dir.path)]) == 2
    assert f"error: {path if os.getuid() == 0 else ''}" in capsys.readouterr().err


def test_a_run_of_another_host_is_cancelled_there(run_dir, capsys):
    names = {"pid": 17, "holder": "launcher", "hostname": "n3"}
    (run_dir.path / "launcher.lock").write_text(json.dumps(names))
    assert main(["cancel", str(run_dir.path)]) == 2
    assert "process 17 on n3" in capsys.readouterr().err


def test_a_run_that_had_not_begun_is_started_again_not_resumed(tmp_path):
    state = RunState(name="new", path=str(tmp_path / "new"), state=State.RUNNING)
    assert _way_back(state) == "it had not begun: the same command starts it"
    RunDir.create(tmp_path / "new", RunConfig())
    assert "launcher resume" in _way_back(state)


def test_a_finished_run_is_not_resumed(run_dir, capsys):
    steps = run_dir.config.optim.steps
    run_dir.metrics.write_text(json.dumps(train_line(steps)) + "\n")
    run_dir.ledger.append(TrainingEnded(outcome=Outcome.FINISHED, step=steps))
    publish_step(run_dir.checkpoints, steps)
    assert main(["resume", str(run_dir.path)]) == 2
    assert f"step {steps:,}" in capsys.readouterr().err


@pytest.fixture
def canceled(run_dir: RunDir) -> RunDir:
    """A run that was submitted as job 1, named run-1, and canceled."""
    run_dir.ledger.append(Submitted(job="1", job_name="run-1"))
    time.sleep(0.002)  # the ledger's times are milliseconds
    run_dir.ledger.append(Canceled(job="1"))
    cluster = ClusterConfig(ranks_per_node=1)
    snapshot, script = Snapshot(run_dir.path), render(job_of(run_dir.path, cluster))
    assert is_script_of(script, run_dir.path)
    snapshot.take_settings(RunConfig(), cluster)
    snapshot.script.write_text(script)
    return run_dir


SQUEUE = listed("1|1|N/A|COMPLETING|None||N/A|'$WORK_DIR'")


def test_a_run_is_resumed_only_when_its_own_job_has_ended(canceled, tmp_path, monkeypatch, capsys):
    """Also a run that has made its last step and has not saved it."""
    fake_commands(tmp_path, monkeypatch, squeue=SQUEUE, sbatch="echo 2")
    steps = canceled.config.optim.steps
    for is_trained in (False, True):
        if is_trained:
            canceled.metrics.write_text(json.dumps(train_line(steps)) + "\n")
            canceled.ledger.append(JobStarted(job="1", restart=0, nodes=("n1",), step=0))
            canceled.ledger.append(TrainingBegan(step=0, world_size=1))
            canceled.ledger.append(TrainingEnded(outcome=Outcome.FINISHED, step=steps))
        monkeypatch.setenv("WORK_DIR", str(Snapshot(canceled.path).code))
        assert main(["resume", str(canceled.path)]) == 2
        assert "completing" in capsys.readouterr().err
    monkeypatch.setenv("WORK_DIR", "/home/me")  # only the number is that of its job
    assert main(["resume", str(canceled.path)]) == 0
    assert capsys.readouterr().out.startswith("job 2 ")


def test_a_moved_or_copied_slurm_run_is_not_resumed_in_the_old_place(canceled, tmp_path, capsys):
    copy = tmp_path / "run-copy"
    shutil.copytree(canceled.path, copy)
    assert main(["resume", str(copy)]) == 2
    assert str(copy) in capsys.readouterr().err
    Snapshot(copy).script.unlink()
    assert main(["resume", str(copy)]) == 2
    assert str(copy) in capsys.readouterr().err


def test_a_job_on_other_data_is_refused_before_it_is_queued(
    canceled, tmp_path, monkeypatch, capsys
):
    fake_commands(tmp_path, monkeypatch, squeue=SQUEUE, sbatch="echo 2")
    monkeypatch.setenv("WORK_DIR", "/home/me")  # of another's job 1
    first, other = (make_tiny_corpus(tmp_path / f"c{seed}", seed=seed) for seed in (1, 2))
    tokenizer, validation = tokenizer_of(first).fingerprint, split_hash(first, VALIDATION)
    began = TrainingBegan(step=0, world_size=1, tokenizer=tokenizer, validation=validation)
    canceled.ledger.append(began)
    resumed = ["resume", str(canceled.path)]
    assert main([*resumed, f"data.path={other}"]) == 2
    assert f"validation split of {other} has the hash" in capsys.readouterr().err
    assert main([*resumed, f"data.path={first}"]) == 0
    assert capsys.readouterr().out.startswith("job 2 ")


def test_a_rate_at_an_older_step_changes_the_course_that_the_run_had_there(run_dir):
    first = run_dir.config.optim
    later = replace(first, steps=2 * first.steps, schedule=replace(first.schedule, shape="wsd"))
    run_dir.change_settings(replace(run_dir.config, optim=later), first.steps)
    assert course_at(run_dir, 2 * first.steps) == []
    assert set(course_at(run_dir, first.steps // 2)) == {
        f"optim.steps={first.steps}", f"optim.schedule.shape={first.schedule.shape}"
    }  # fmt: skip


def test_a_step_whose_checkpoint_is_pruned_is_refused_before_an_attempt(run_dir):
    for step in (10, 20):
        published = Published(step=step, attempt="a")
        run_dir.ledger.append(published)
    publish_step(run_dir.checkpoints, 20)
    events = len(run_dir.ledger.read())
    with pytest.raises(ConfigError, match="no checkpoint of step 10; give --from-step 0 or 20"):
        run_dir.ask_to_resume_from(10)
    assert len(run_dir.ledger.read()) == events
