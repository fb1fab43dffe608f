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
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import flip_a_bit, publish_step


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 10 to 40."""
    kept = CheckpointConfig(interval=10, keep_last=2)
    config = RunConfig(model=ModelConfig(vocab_size=300), checkpoint=kept)
    run_dir = RunDir.create(tmp_path / "run", config)
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
    assert "101, expected 100" in said
    found = marker.latest_valid(run_dir.checkpoints, lambda line: None)
    assert found is not None
    assert found.step == 40, "a resume takes the one before"


def test_settings_that_can_keep_nothing_are_errors():
    with pytest.raises(ConfigError, match="keep_every=-1"):
        CheckpointConfig(keep_every=-1)
