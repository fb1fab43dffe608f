from __future__ import annotations

import pytest

from foundation.errors import ConfigError
from foundation.settings import load_config
from pretrain.cli import main
from pretrain.config.run import RunConfig
from pretrain.demo.command import CONFIG, Demo
from pretrain.rundir.run_dir import RunDir


@pytest.mark.parametrize("where", ["precious", "corpus/demo", "file"])
def test_a_directory_of_something_else_is_rejected_and_kept(where, tmp_path, capsys):
    for name in ("precious", "corpus"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("word " * 400_000)
    (tmp_path / "file").touch()
    options = ["--run-dir", str(tmp_path / where), "--corpus", str(tmp_path / "corpus")]
    assert main(["demo", *options]) == 2
    assert str(tmp_path / where) in capsys.readouterr().err
    assert (tmp_path / "precious" / "thesis.txt").exists()
    assert not (tmp_path / "corpus" / "demo").exists()


def test_a_run_of_other_steps_is_rejected(tmp_path):
    RunDir.create(tmp_path / "killed", load_config(RunConfig, CONFIG, Demo(tmp_path).overrides))
    Demo(tmp_path)
    with pytest.raises(ConfigError, match="has 640 steps, expected 24"):
        Demo(tmp_path, steps=24)


def test_too_few_steps_to_kill_and_resume_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="--steps 8 is too short"):
        Demo(tmp_path, steps=8)


@pytest.mark.parametrize("steps", [16, 24, 640, 1000])
def test_the_kill_comes_after_a_checkpoint_and_before_the_next(tmp_path, steps):
    demo = Demo(tmp_path, steps)
    interval = demo.config.checkpoint.interval
    assert interval <= demo.kill_step < steps
    assert interval == 1 or demo.kill_step % interval
