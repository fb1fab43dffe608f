"""An evaluation that a signal ends: nothing is lost, and the next attempt makes it, once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.marker import latest_step
from pretrain.cli import main
from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.exit_status import EXIT_STOPPED
from pretrain.rundir.ledger import is_finished
from pretrain.rundir.run_dir import RunDir

STEPS = 8
TIMES = (
    *("seconds", "time", "totals", "tokens_per_second", "mfu", "data_wait", "used_memory_gib"),
    *("save_stall", "stall", "slowest_rank", "straggler_ratio"),
)


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation") / "tiny.yaml"
    path.write_text(
        f"""name: tiny
model: {{num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: 4, keep_last: 1}}
evaluation: {{interval: 2, max_tokens: 600, lanes: 2}}
metrics: {{interval: 3, tensorboard: false}}
"""
    )
    return path


@pytest.fixture(scope="module")
def uninterrupted(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = RunDir(tmp_path_factory.mktemp("uninterrupted") / "run")
    assert train(experiment, run_dir) == 0
    return run_dir


def train(experiment: Path, run_dir: RunDir) -> int:
    return main(["train", str(experiment), "--run-dir", str(run_dir.path)])


def lines_of(run_dir: RunDir) -> list[dict[str, Any]]:
    """What does not depend on the time."""
    lines = run_dir.read_metrics()
    return [{name: line[name] for name in line if name not in TIMES} for line in lines]


@pytest.mark.parametrize("step", [6, STEPS])
def test_a_stopped_evaluation_is_made_by_the_next_attempt_and_every_line_is_there_once(
    experiment, uninterrupted, tmp_path, monkeypatch, step
):
    run_dir = RunDir(tmp_path / "run")
    monkeypatch.setenv(VARIABLE, f"sigterm-in-evaluation@{step}")
    assert train(experiment, run_dir) == EXIT_STOPPED
    assert latest_step(run_dir.checkpoints) == step
    assert step not in [each["step"] for each in lines_of(run_dir) if each["kind"] == "evaluation"]
    monkeypatch.delenv(VARIABLE)
    assert train(experiment, run_dir) == 0
    assert lines_of(run_dir) == lines_of(uninterrupted)


def test_a_run_killed_in_its_last_evaluation_repeats_no_step(
    experiment, uninterrupted, tmp_path, monkeypatch
):
    run_dir = RunDir(tmp_path / "run")
    monkeypatch.setenv(VARIABLE, f"sigkill-in-evaluation@{STEPS}")
    killed = subprocess.run(train_command(experiment, run_dir.path), capture_output=True)
    assert killed.returncode == -9
    assert latest_step(run_dir.checkpoints) == STEPS
    assert train(experiment, run_dir) == 0
    assert lines_of(run_dir) == lines_of(uninterrupted)
    assert is_finished(run_dir.ledger.read()[-1])


def test_a_signal_to_one_rank_ends_the_evaluation_of_all(experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    fault = {VARIABLE: "sigterm-in-evaluation@4"}  # of the last rank
    command = train_command(experiment, run_dir.path)
    with RankGroup(command, 2, tmp_path / "logs", environment=fault) as group:
        assert group.wait() == [EXIT_STOPPED] * 2
    assert latest_step(run_dir.checkpoints) == 4
    assert lines_of(run_dir)[-1]["kind"] == "train"
