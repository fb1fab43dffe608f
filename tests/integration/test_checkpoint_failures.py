"""A full disk or a corrupted checkpoint: an error of one line, nothing half-written."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.rundir.events import OutOfMemory, TrainingBegan
from pretrain.rundir.ledger import events_of
from pretrain.rundir.run_dir import RunDir

SETTINGS = (
    "model.num_layers=2", "model.d_model=64", "model.num_heads=2", "model.memory_length=8",
    "data.lanes=4", "data.segment_length=8", "optim.steps=20", "checkpoint.interval=10",
    "engine.kind=torch",
    "evaluation.interval=0", "evaluation.max_tokens=200", "metrics.tensorboard=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failures") / "tiny.yaml"
    path.write_text(f"data: {{path: {tiny_corpus}}}\n")
    return path


def train(
    experiment: Path, run_dir: RunDir, *more: str, file_limit_kib: int = 0
) -> subprocess.CompletedProcess[str]:
    """`pretrain train` with a file size limit, which fails at the same calls as a full disk."""
    command = train_command(experiment, run_dir.path)
    limited = (
        ["bash", "-c", f'ulimit -f {file_limit_kib}; exec "$@"', "bash"] if file_limit_kib else []
    )
    return subprocess.run([*limited, *command, *SETTINGS, *more], capture_output=True, text=True)


def test_a_full_disk_ends_a_save_in_one_line_and_leaves_older_checkpoints_whole(
    experiment, tmp_path, monkeypatch
):
    run_dir = RunDir(tmp_path / "run")
    assert train(experiment, run_dir, "optim.steps=10").returncode == 0
    ended = train(experiment, run_dir, "checkpoint.storage_patience_seconds=0", file_limit_kib=100)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    error = [line for line in ended.stderr.splitlines() if line.startswith("ERROR ")]
    assert len(error) == 1
    assert "could not save step 20" in error[0]
    assert "older checkpoints are untouched" in error[0]
    assert [entry.name for entry in run_dir.checkpoints.iterdir()] == ["step-00000010"]
    marker.verify(run_dir.checkpoints / "step-00000010")
    assert "lost" not in ended.stderr
    capability = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    resumed = train(experiment, run_dir)
    assert resumed.returncode == 0
    assert [line["step"] for line in run_dir.read_metrics() if line["kind"] == "train"] == list(
        range(1, 21)
    )
    change = f"not bitwise from here: CPU capability {capability} -> DEFAULT\n"
    assert change in resumed.stderr
    began = [each for each in run_dir.ledger.read() if isinstance(each, TrainingBegan)]
    environments = [each.environment for each in began]
    assert environments[0] == environments[1], "the same machine, so nothing to say"
    assert "not bitwise" not in ended.stderr
    assert environments[2] == {**environments[0], "CPU capability": "DEFAULT"}
    for package in ("torch", "numpy", "deepspeed"):
        assert environments[0][package] == version(package)
    assert environments[0].keys() >= {"GPU", "CUDA", "threads"}
    assert change.strip() in began[2].description


def test_a_rank_that_cannot_write_ends_all_ranks_long_before_the_next_save(experiment, tmp_path):
    run_dir, interval = RunDir(tmp_path / "run"), 250
    longer = (
        f"checkpoint.interval={interval}", "checkpoint.storage_patience_seconds=0",
        "optim.steps=100000", "metrics.interval=5",
    )  # fmt: skip
    command = train_command(experiment, run_dir.path)
    only_rank_1 = ["bash", "-c", 'if [ "$RANK" = 1 ]; then ulimit -f 100; fi; exec "$@"', "bash"]
    with RankGroup([*only_rank_1, *command, *SETTINGS, *longer], 2, tmp_path / "logs") as group:
        assert group.wait() == [2, 2]
    for log in group.logs:
        errors = [line for line in log.read_text().splitlines() if line.startswith("ERROR ")]
        assert len(errors) == 1
        assert f"could not save step {interval}" in errors[0]
        assert "File too large" in errors[0]
    assert interval <= run_dir.read_metrics()[-1]["step"] < 2 * interval - 5
    assert not list(run_dir.checkpoints.iterdir())


def test_a_rank_that_loses_sight_of_the_run_directory_makes_none_of_its_own(experiment, tmp_path):
    """As under a lost mount: rank 1's path leads to an empty directory from one moment on."""
    run_dir, view, empty = RunDir(tmp_path / "run"), tmp_path / "run-of-rank-1", tmp_path / "empty"
    run_dir.path.mkdir()
    empty.mkdir()
    view.symlink_to(run_dir.path)
    (tmp_path / "later").symlink_to(empty)
    longer = (
        "checkpoint.interval=400", "checkpoint.storage_patience_seconds=0",
        "optim.steps=100000", "metrics.interval=5",
    )  # fmt: skip
    own_view = '[ "$RANK" = 0 ] || set -- "${@/#"$0"/$0-of-rank-1}"; exec "$@"'
    command = [
        "bash",
        "-c",
        own_view,
        str(run_dir.path),
        *train_command(experiment, run_dir.path),
        *SETTINGS,
        *longer,
    ]
    with RankGroup(command, 2, tmp_path / "logs") as group:
        while not (run_dir.metrics.exists() and run_dir.metrics.stat().st_size):
            assert group.poll() == [None, None], [log.read_text() for log in group.logs]
            time.sleep(0.05)
        (tmp_path / "later").rename(view)
        assert group.wait() == [2, 2]
    for log in group.logs:
        (error,) = [line for line in log.read_text().splitlines() if line.startswith("ERROR ")]
        assert "could not save step 400" in error
        assert "No such file or directory" in error
    assert not list(run_dir.checkpoints.iterdir())
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


def test_a_corrupted_checkpoint_is_named_and_the_one_before_is_used(experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    assert train(experiment, run_dir).returncode == 0
    before = run_dir.read_metrics()
    damaged = run_dir.checkpoints / "step-00000020" / files.rank_file(0)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    ended = train(experiment, run_dir, "optim.steps=30", "optim.schedule.shape=cosine")
    assert ended.returncode == 0, ended.stderr
    assert damaged.name in ended.stderr
    assert f"resuming from {run_dir.checkpoints / 'step-00000010'}" in ended.stderr
    assert [line["step"] for line in run_dir.read_metrics() if line["kind"] == "train"] == list(
        range(1, 31)
    )
    assert [line for line in run_dir.read_metrics() if line["step"] <= 10] == [
        line for line in before if line["step"] <= 10
    ]


def test_with_every_checkpoint_corrupted_nothing_is_trained(experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    assert train(experiment, run_dir).returncode == 0
    for step in (10, 20):
        (run_dir.checkpoints / files.step_directory(Path(), step) / files.MARKER).write_text(
            "wrong"
        )
    metrics = run_dir.metrics.read_bytes()
    ended = train(experiment, run_dir, "optim.steps=30")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert run_dir.metrics.read_bytes() == metrics


def test_a_resume_reports_a_ledger_that_is_missing_beside_checkpoints(experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    assert train(experiment, run_dir, "optim.steps=10").returncode == 0
    run_dir.ledger.path.unlink()
    resumed = train(experiment, run_dir)
    assert resumed.returncode == 0
    assert resumed.stderr.count("lost") == 1
    assert "ledger.jsonl has no earlier start; what it said, such as rewinds, is lost" in (
        resumed.stderr
    )
