"""Local checkpoints of two ranks: which are used after a kill, and that nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.commands.same_run import differences
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.ledger import events_of
from pretrain.rundir.run_dir import RunDir
from tests.helpers.local_tier import STEPS


@pytest.fixture(scope="module")
def output(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tests.helpers.local_tier` made: all runs but the first were killed after step 11."""
    path = tmp_path_factory.mktemp("local-tier")
    command = [sys.executable, "-m", "tests.helpers.local_tier", str(tiny_corpus), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def resumed(output: Path, name: str) -> list[tuple[int, bool]]:
    """The step of each resumption, and whether it was local."""
    events = events_of(RunDir(output / name).ledger.read(), TrainingBegan)
    return [(event.step, event.local) for event in events if event.step]


def said(output: Path, name: str) -> str:
    return (output / f"{name}-logs" / "rank-0.log").read_text()


def assert_bitwise(output: Path, name: str) -> None:
    assert differences(RunDir(output / "uninterrupted"), RunDir(output / name), STEPS) == []


@pytest.mark.slow
def test_a_killed_run_resumes_from_the_local_step_bitwise_and_leaves_nothing_there(output):
    steps = sorted(path.name for path in (output / "killed-disk").glob("run-*/rank-00001/*"))
    assert steps == ["step-00000008", "step-00000010"], "6 is on the shared disk, 4 is old"
    assert resumed(output, "resumed") == [(10, True)]
    assert "resuming from the local checkpoints of step 10" in said(output, "resumed")
    assert_bitwise(output, "resumed")
    assert not list((output / "resumed-disk").iterdir())
    shared = [path.name for path in (output / "resumed" / "checkpoints").iterdir()]
    assert sorted(shared) == ["step-00000006", "step-00000012"]


@pytest.mark.slow
def test_all_ranks_refuse_a_step_of_which_one_rank_has_a_damaged_file(output):
    assert resumed(output, "damaged") == [(8, True)]
    assert "local checkpoints of step 10 are not used: rank 1: " in said(output, "damaged")
    assert_bitwise(output, "damaged")


@pytest.mark.slow
def test_a_rank_on_another_node_sends_all_to_the_shared_checkpoint(output):
    assert resumed(output, "moved-once") == [(6, False)]
    why = "local checkpoints are not used: rank 1: has none on its node; using step 6, the shared"
    assert why in said(output, "moved")


@pytest.mark.slow
def test_steps_that_the_run_has_made_again_do_not_come_back(output):
    assert resumed(output, "moved") == [(6, False), (8, True)]
    assert_bitwise(output, "moved")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("one-rank", "rank 0: step 10 was saved by rank 0 of 2, now it is rank 0 of 1"),
        ("stage", "rank 0: step 10 was saved with other settings (engine.zero_stage: 2 -> 1)"),
    ],
)
def test_other_ranks_or_another_stage_use_the_shared_checkpoint(output, name, why):
    assert resumed(output, name) == [(6, False)]
    assert f"local checkpoints are not used: {why}; using step 6, the shared one" in said(
        output, name
    )
    tolerance = 1e-5
    left = RunDir(output / "uninterrupted")
    assert differences(left, RunDir(output / name), STEPS, tolerance) == []
