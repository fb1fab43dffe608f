"""A full disk, a corrupted checkpoint, an older attempt: one line, and nothing half-written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint import marker
from pretrain.checkpoint.directory import MARKER, steps_on_disk
from pretrain.cli import main
from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.rundir.events import OutOfMemory, TrainingBegan
from pretrain.rundir.ledger import events_of
from pretrain.rundir.lock import VARIABLE, Fence
from pretrain.rundir.run_dir import RunDir
from tests.helpers.full_disk import full_disk

SETTINGS = (
    "model.num_layers=2", "model.d_model=64", "model.num_heads=2", "model.memory_length=8",
    "data.lanes=4", "data.segment_length=8", "optim.steps=20", "checkpoint.interval=10",
    "engine.kind=torch",
    "evaluation.interval=0", "evaluation.max_tokens=200", "metrics.tensorboard=false",
)  # fmt: skip
IMPATIENT = "checkpoint.storage_patience_seconds=0"
LONGER = "optim.steps=30"


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failures") / "tiny.yaml"
    path.write_text(f"data: {{path: {tiny_corpus}}}\n")
    return path


def train(experiment: Path, run_dir: RunDir, *more: str) -> int:
    """`pretrain train` in this process."""
    return main(["train", str(experiment), f"--run-dir={run_dir.path}", *SETTINGS, *more])


@pytest.fixture(scope="module")
def trained(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that has made 20 steps."""
    run_dir = RunDir(tmp_path_factory.mktemp("trained") / "run")
    assert train(experiment, run_dir) == 0
    return run_dir


@pytest.fixture
def run_dir(trained: RunDir, tmp_path: Path) -> RunDir:
    """A copy of it."""
    return RunDir(shutil.copytree(trained.path, tmp_path / "run"))


def steps_of(run_dir: RunDir) -> list[int]:
    return [line["step"] for line in run_dir.read_metrics() if line["kind"] == "train"]


def errors_in(log: str) -> list[str]:
    assert "Traceback" not in log
    return [line for line in log.splitlines() if line.startswith("ERROR ")]


def test_a_full_disk_ends_a_save_in_one_line_and_leaves_older_checkpoints_whole(
    experiment, run_dir, capsys
):
    with full_disk(100 << 10):
        assert train(experiment, run_dir, LONGER, IMPATIENT) == 2
    log = capsys.readouterr().err
    (error,) = errors_in(log)
    assert "could not save step 30" in error
    assert "older checkpoints are untouched" in error
    names = sorted(entry.name for entry in run_dir.checkpoints.iterdir())
    assert names == ["step-00000010", "step-00000020"]
    for name in names:
        marker.verify(run_dir.checkpoints / name)
    assert "not bitwise" not in log
    torch.set_num_threads(2)
    assert train(experiment, run_dir, LONGER) == 0
    assert steps_of(run_dir) == list(range(1, 31))
    assert "not bitwise from here: threads 1 -> 2\n" in capsys.readouterr().err
    first, second, third = events_of(run_dir.ledger.read(), TrainingBegan)
    assert first.environment == second.environment, "the same machine, so nothing to say"
    assert third.environment == {**first.environment, "threads": "2"}
    assert third.changes == {"threads": ("1", "2")}
    for package in ("torch", "numpy", "deepspeed"):
        assert first.environment[package] == version(package)


def test_with_every_checkpoint_corrupted_nothing_is_trained(experiment, run_dir, capsys):
    for directory in run_dir.checkpoints.iterdir():
        (directory / MARKER).write_text("wrong")
    metrics = run_dir.metrics.read_bytes()
    assert train(experiment, run_dir, LONGER) == 2
    assert len(errors_in(capsys.readouterr().err)) == 1
    assert run_dir.metrics.read_bytes() == metrics


def test_a_resume_reports_a_ledger_that_is_missing_beside_checkpoints(experiment, run_dir, capsys):
    run_dir.ledger.path.unlink()
    assert train(experiment, run_dir, LONGER) == 0
    lost = "ledger.jsonl has no earlier start; what it said, such as rewinds, is lost"
    assert capsys.readouterr().err.count(lost) == 1


def test_a_second_run_in_the_same_directory_is_refused(experiment, run_dir, capsys):
    before = run_dir.metrics.read_bytes()
    with run_dir.locked():
        assert train(experiment, run_dir, LONGER) == 2
    assert f"is in use by process {os.getpid()} (train)" in capsys.readouterr().err
    assert run_dir.metrics.read_bytes() == before


def test_a_stale_attempt_writes_neither_metrics_nor_checkpoints(
    experiment, tmp_path, capsys, monkeypatch
):
    """Its ranks may survive on a node that was cut off."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    Fence(run_dir.path, "newer").claim()
    monkeypatch.setenv(VARIABLE, "older")
    assert train(experiment, run_dir, "metrics.interval=1") == 2
    assert "attempt older exits: attempt newer has claimed" in capsys.readouterr().err
    assert run_dir.read_metrics() == []
    assert steps_on_disk(run_dir.checkpoints) == []


INTERVAL = 150
ENDLESS = (
    f"checkpoint.interval={INTERVAL}", IMPATIENT, "optim.steps=100000", "metrics.interval=5"
)  # fmt: skip


def assert_all_failed_to_save(group: RankGroup, run_dir: RunDir, reason: str) -> None:
    assert group.wait() == [2, 2]
    for log in group.logs:
        (error,) = errors_in(log.read_text())
        assert f"could not save step {INTERVAL}" in error
        assert reason in error
    assert not list(run_dir.checkpoints.iterdir())


def test_a_rank_that_cannot_write_ends_all_ranks_long_before_the_next_save(experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    command = train_command(experiment, run_dir.path, *SETTINGS, *ENDLESS)
    only_rank_1 = ["bash", "-c", 'if [ "$RANK" = 1 ]; then ulimit -f 100; fi; exec "$@"', "bash"]
    with RankGroup([*only_rank_1, *command], 2, tmp_path / "logs") as group:
        assert_all_failed_to_save(group, run_dir, "File too large")
    assert INTERVAL <= run_dir.read_metrics()[-1]["step"] < 2 * INTERVAL - 5


def test_a_rank_that_loses_sight_of_the_run_directory_makes_none_of_its_own(experiment, tmp_path):
    """As under a lost mount: rank 1's path leads to an empty directory from one moment on."""
    run_dir, view, empty = RunDir(tmp_path / "run"), tmp_path / "run-of-rank-1", tmp_path / "empty"
    run_dir.path.mkdir()
    empty.mkdir()
    view.symlink_to(run_dir.path)
    (tmp_path / "later").symlink_to(empty)
    own_view = '[ "$RANK" = 0 ] || set -- "${@/#"$0"/$0-of-rank-1}"; exec "$@"'
    command = train_command(experiment, run_dir.path, *SETTINGS, *ENDLESS)
    command = ["bash", "-c", own_view, str(run_dir.path), *command]
    with RankGroup(command, 2, tmp_path / "logs") as group:
        while not (run_dir.metrics.exists() and run_dir.metrics.stat().st_size):
            assert group.poll() == [None, None], [log.read_text() for log in group.logs]
            time.sleep(0.05)
        (tmp_path / "later").rename(view)
        assert_all_failed_to_save(group, run_dir, "No such file or directory")
    assert not (empty / "checkpoints").exists()


def test_memory_that_a_cpu_lacks_halves_the_lanes_and_a_save_needs_no_new_thread(
    experiment, tmp_path
):
    run_dir = RunDir(tmp_path / "run")
    more = ("data.lanes=8", "optim.steps=4", "checkpoint.interval=2", "evaluation.interval=2")
    command = [sys.executable, "-m", "tests.helpers.no_memory", "save,backward,step,evaluate"]
    command += [str(experiment), "--run-dir", str(run_dir.path), *SETTINGS, *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    lanes = [event.micro_batch_lanes for event in events_of(run_dir.ledger.read(), OutOfMemory)]
    assert lanes == [8, 4, 2]
    assert marker.steps_that_count(run_dir.checkpoints) == [2, 4]
