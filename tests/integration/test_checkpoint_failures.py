"""A full disk, a corrupted checkpoint, an older attempt: one line, and nothing half-written."""

import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.directory import MARKER, steps_on_disk
from pretrain.checkpoint.verify import latest_step, steps_that_count, verify
from pretrain.cli import main
from pretrain.rundir.compare_runs import run_differences
from pretrain.rundir.events import OutOfMemory, TrainingBegan
from pretrain.rundir.exit_statuses import EXIT_SITE_FAILED
from pretrain.rundir.history import find_events, is_finished
from pretrain.rundir.lock import VARIABLE, Fence
from pretrain.rundir.run_dir import RunDir
from tests.helpers.forked_runs import EVALUATED, FAILS_AT, STEPS, make_runs
from tests.helpers.forked_runs import SETTINGS as FORKED_SETTINGS
from tests.helpers.full_disk import full_disk

SETTINGS = (
    "model.num_layers=2", "model.d_model=64", "model.num_heads=2", "model.memory_length=8",
    "data.lanes=4", "data.segment_length=8", "optim.steps=20", "checkpoint.interval=10",
    "optim.schedule.shape=constant", "engine.kind=torch",
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


def steps_of(run_dir: RunDir, kind: str) -> list[int]:
    return [line["step"] for line in run_dir.read_metrics() if line["kind"] == kind]


def errors_in(log: str) -> list[str]:
    assert "Traceback" not in log
    return [line for line in log.splitlines() if line.startswith("ERROR ")]


def test_a_full_disk_ends_a_save_in_a_line_and_spares_older_ones(experiment, run_dir, capsys):
    with full_disk(100 << 10):
        assert train(experiment, run_dir, LONGER, IMPATIENT) == EXIT_SITE_FAILED
    log = capsys.readouterr().err
    (error,) = errors_in(log)
    assert "step 30" in error
    names = sorted(entry.name for entry in run_dir.checkpoints.iterdir())
    assert names == ["step-00000010", "step-00000020"]
    for name in names:
        verify(run_dir.checkpoints / name)
    assert "not bitwise" not in log
    torch.set_num_threads(2)
    assert train(experiment, run_dir, LONGER) == 0
    assert steps_of(run_dir, "train") == list(range(1, 31))
    assert "threads 1 -> 2\n" in capsys.readouterr().err
    first, second, third = find_events(run_dir.ledger.read(), TrainingBegan)
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
    assert capsys.readouterr().err.count("ledger.jsonl") == 1


def test_a_stale_attempt_writes_no_metrics_and_no_saves(experiment, tmp_path, capsys, monkeypatch):
    """Its ranks may survive on a node that was cut off."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    Fence(run_dir.path, "newer").claim()
    monkeypatch.setenv(VARIABLE, "older")
    assert train(experiment, run_dir, "metrics.interval=1") == 2
    error = capsys.readouterr().err
    assert "attempt older" in error
    assert "attempt newer" in error
    assert run_dir.read_metrics() == []
    assert steps_on_disk(run_dir.checkpoints) == []


@pytest.fixture(scope="module")
def output(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tests.helpers.forked_runs` made."""
    path = tmp_path_factory.mktemp("forked")
    make_runs(tiny_corpus, path)
    return path


def log_of(output: Path, name: str, rank: int = 0) -> str:
    return (output / f"{name}-logs" / f"rank-{rank}.log").read_text()


def assert_all_failed_to_save(output: Path, name: str, reason: str) -> RunDir:
    run_dir = RunDir(output / name)
    for rank in range(2):
        (error,) = errors_in(log_of(output, name, rank))
        assert f"step {FAILS_AT}" in error
        assert reason in error
    assert not list(run_dir.checkpoints.iterdir())
    return run_dir


@pytest.mark.slow
def test_a_rank_that_cannot_write_ends_all_ranks_long_before_the_next_save(output):
    run_dir = assert_all_failed_to_save(output, "cannot-write", "File too large")
    assert FAILS_AT <= run_dir.read_metrics()[-1]["step"] < 2 * FAILS_AT - 5


@pytest.mark.slow
def test_a_rank_that_loses_sight_of_the_run_directory_makes_none_of_its_own(output):
    assert_all_failed_to_save(output, "lost", "No such file or directory")
    assert not (output / "lost-empty" / "checkpoints").exists()


@pytest.mark.slow
def test_memory_that_a_cpu_lacks_halves_the_lanes_and_a_save_needs_no_new_thread(output):
    run_dir = RunDir(output / "no-memory")
    lanes = [event.micro_batch_lanes for event in find_events(run_dir.ledger.read(), OutOfMemory)]
    assert lanes == [8, 4, 2]
    assert steps_that_count(run_dir.checkpoints) == [2, 4]


# ----------------------------------------------------------------- local checkpoints of two ranks


def resumed(output: Path, name: str) -> list[tuple[int, bool]]:
    """The step of each resumption, and whether it was local."""
    events = find_events(RunDir(output / name).ledger.read(), TrainingBegan)
    return [(event.step, event.local) for event in events if event.step]


def assert_bitwise(output: Path, name: str) -> None:
    assert run_differences(RunDir(output / "uninterrupted"), RunDir(output / name), STEPS) == []


@pytest.mark.slow
def test_a_killed_run_resumes_from_the_local_step_bitwise_and_leaves_nothing_there(output):
    steps = sorted(path.name for path in (output / "killed-disk").glob("run-*/rank-00001/*"))
    assert steps == ["step-00000008", "step-00000010"], "6 is on the shared disk, 4 is old"
    assert resumed(output, "resumed") == [(10, True)]
    assert_bitwise(output, "resumed")
    assert not list((output / "resumed-disk").iterdir())
    assert steps_on_disk(output / "resumed" / "checkpoints") == [6, 12]


@pytest.mark.slow
def test_all_ranks_refuse_a_step_of_which_one_rank_has_a_damaged_file(output):
    assert resumed(output, "damaged") == [(8, True)]
    assert re.search("step 10 .* rank 1: ", log_of(output, "damaged"))
    assert_bitwise(output, "damaged")


@pytest.mark.slow
def test_a_rank_on_another_node_sends_all_to_the_shared_checkpoint(output):
    assert resumed(output, "moved-once") == [(6, False)]
    assert re.search(r"rank 1: .* step 6, ", log_of(output, "moved"))


@pytest.mark.slow
def test_steps_that_the_run_has_made_again_do_not_come_back(output):
    assert resumed(output, "moved") == [(6, False), (8, True)]
    assert_bitwise(output, "moved")


# ------------------------------------------------------------------ runs that end in an evaluation


TIMES = (
    *("seconds", "time", "totals", "tokens_per_second", "mfu", "data_wait", "used_memory_gib"),
    *("save_stall", "stall", "slowest_rank", "straggler_ratio"),
)


def lines_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """What does not depend on the time."""
    lines = run_dir.read_metrics()
    return [{name: line[name] for name in line if name not in TIMES} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "evaluated"), [("killed-evaluating", 8, [2, 4, 6]), ("stopped-6", 6, [2, 4])]
)
def test_an_evaluation_stopped_or_killed_is_made_by_the_next_attempt(output, name, step, evaluated):
    run_dir = RunDir(output / name)
    assert latest_step(run_dir.checkpoints) == step
    assert steps_of(run_dir, "evaluation") == evaluated
    run = ["train", str(output / "experiment.yaml"), f"--run-dir={run_dir.path}"]
    assert main([*run, *FORKED_SETTINGS, *EVALUATED]) == 0
    assert lines_of(run_dir) == lines_of(RunDir(output / "evaluated"))
    assert is_finished(run_dir.ledger.read()[-1])


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_the_evaluation_of_all(output):
    run_dir = RunDir(output / "stopped")
    assert latest_step(run_dir.checkpoints) == 4
    assert run_dir.read_metrics()[-1]["kind"] == "train"
