from __future__ import annotations

import json
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.cli import main
from pretrain.config.model import ModelConfig
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.recovery import loss_spikes
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import flip_a_bit, publish_step
from tests.helpers.metrics import train_line


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 10 to 40."""
    kept = CheckpointConfig(interval=10, keep_last=2)
    run_dir = RunDir.create(
        tmp_path / "run", RunConfig(model=ModelConfig(vocab_size=300), checkpoint=kept)
    )
    for step in (10, 20, 30, 40):
        publish_step(run_dir.checkpoints, step, tokens_seen=64 * step)
    return run_dir


def test_list_names_every_step_even_if_its_index_is_unreadable(run_dir, capsys):
    (run_dir.checkpoints / "step-00000020" / files.INDEX).write_text("{")
    evaluation = {"kind": "evaluation", "step": 10, "loss": 2.1}
    run_dir.metrics.write_text(json.dumps(evaluation) + "\n")
    assert main(["checkpoint", "list", str(run_dir.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "10", "20", "30", "40"]
    assert lines[1].split()[1:4] == ["2", "640", "2.1000"]
    assert "unreadable" in lines[2]
    assert lines[3].split()[3] == "-"
    assert main(["checkpoint", "list", str(run_dir.path), "--json"]) == 0
    first, second, *_ = json.loads(capsys.readouterr().out)
    assert (first["ranks"], first["tokens"], first["validation"]) == (2, 640, 2.1)
    assert second["ranks"] is None


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_verify_names_the_corrupted_file_and_fails(run_dir, capsys, name):
    assert main(["checkpoint", "verify", str(run_dir.path)]) == 0
    flip_a_bit(run_dir.checkpoints / "step-00000030" / name)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(run_dir.path)]) == 1
    said = capsys.readouterr().out
    assert "step 30: CORRUPTED" in said
    assert name in said
    assert "3 of 4" in said
    assert main(["checkpoint", "verify", str(run_dir.path), "--json"]) == 1
    found = {each["step"]: each["problem"] for each in json.loads(capsys.readouterr().out)}
    assert [step for step, problem in found.items() if problem] == [30]


def test_a_checkpoint_with_a_hole_that_readers_refuse_is_not_valid(run_dir, capsys):
    """Its checksums are right: it was written so."""
    publish_step(run_dir.checkpoints, 50, gap=1)
    assert main(["checkpoint", "verify", str(run_dir.path)]) == 1
    said = capsys.readouterr().out
    assert "step 50: CORRUPTED" in said
    assert "a piece of 'w' starts at element 101, expected 100" in said
    found = marker.latest_valid(run_dir.checkpoints, lambda line: None)
    assert found is not None
    assert found.step == 40, "a resume takes the one before"


def test_prune_removes_what_the_run_would_and_a_dry_run_nothing(run_dir, capsys):
    assert main(["checkpoint", "prune", str(run_dir.path), "--dry-run"]) == 0
    assert "10, 20" in capsys.readouterr().out
    assert files.steps_on_disk(run_dir.checkpoints) == [10, 20, 30, 40]
    assert main(["checkpoint", "prune", str(run_dir.path), "--keep-every", "20"]) == 0
    assert files.steps_on_disk(run_dir.checkpoints) == [20, 30, 40]


@pytest.mark.parametrize(("losses_since", "kept"), [(15, [10, 40]), (5, [40]), (41, [40])])
def test_prune_keeps_the_checkpoint_from_before_what_may_become_a_spike(
    run_dir, monkeypatch, losses_since, kept
):
    """As a save of the run would: with `keep_last=1` a rewind would have nothing to go back to."""
    monkeypatch.setattr(loss_spikes, "WINDOW", 10)
    monkeypatch.setattr(loss_spikes, "SPIKE_STEPS", 100)
    lines = [train_line(step, 9.0 if step >= losses_since else 1.0) for step in range(1, 45)]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["checkpoint", "prune", str(run_dir.path), "--keep-last=1"]) == 0
    assert files.steps_on_disk(run_dir.checkpoints) == kept


def test_prune_never_deletes_the_last_valid_checkpoint(run_dir, capsys):
    for step in (30, 40):
        flip_a_bit(run_dir.checkpoints / f"step-{step:08d}" / "rank-00000.safetensors")
    assert main(["checkpoint", "prune", str(run_dir.path)]) == 2
    assert "nothing was deleted" in capsys.readouterr().err
    assert files.steps_on_disk(run_dir.checkpoints) == [10, 20, 30, 40]


def test_prune_is_an_error_while_the_run_trains(run_dir, capsys):
    with run_dir.locked():
        assert main(["checkpoint", "prune", str(run_dir.path)]) == 2
    assert "in use" in capsys.readouterr().err


def test_settings_that_can_keep_nothing_are_errors():
    with pytest.raises(ConfigError, match="keep_every=-1"):
        CheckpointConfig(keep_every=-1)
