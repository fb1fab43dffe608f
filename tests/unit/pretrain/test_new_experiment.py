"""`pretrain new` writes an experiment that trains as it is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.settings import load_config
from pretrain.cli import main
from pretrain.commands.new import TrainingText, as_file, new_experiment
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of
from pretrain.costs.run_time import run_time
from pretrain.rundir.run_dir import RunDir


@pytest.mark.parametrize("parameters", [2e5, 3e6, 1e7, 1e8, 7e9])
@pytest.mark.parametrize("tokens", [3000, 10**7, 10**12])
def test_the_file_reads_back_as_the_run_it_was_written_from(parameters, tokens, tmp_path):
    vocab_size = 300 if parameters < 1e6 else 16_000
    longest = tokens // 40
    text = TrainingText(
        path=Path("/data/a: b"), tokens=tokens, longest_document=longest, vocab_size=vocab_size
    )
    run = new_experiment("mine", text, parameters)
    assert cost_of(run).parameters == pytest.approx(parameters, rel=0.4)
    file = tmp_path / "mine.yaml"
    file.write_text(as_file(run, file, text))
    found = load_config(RunConfig, file)
    assert replace(found, model=replace(found.model, vocab_size=vocab_size)) == run
    assert run.data.lanes * longest <= tokens
    assert run.data.segment_length * run.data.lanes <= tokens
    assert run.optim.steps * run.tokens_per_step <= max(12 * tokens, 200 * run.tokens_per_step)
    assert all(" #" not in line or len(line) < 100 for line in file.read_text().splitlines())


def test_with_paper_the_parts_are_the_defaults_and_the_size_is_still_as_asked(tmp_path):
    text = TrainingText(path=Path("c"), tokens=10**8, longest_document=9000, vocab_size=16_000)
    run = new_experiment("mine", text, 3e7, paper=True)
    file = tmp_path / "mine.yaml"
    file.write_text(as_file(run, file, text))
    model, plain = load_config(RunConfig, file).model, ModelConfig()
    parts = ("positions", "norm", "norm_position", "feed_forward", "query_key_norm", "z_loss")
    for part in (*parts, "num_key_heads"):
        assert getattr(model, part) == getattr(plain, part), part
    assert new_experiment("mine", text, 3e7).model.norm_position != plain.norm_position
    assert cost_of(run).parameters == pytest.approx(3e7, rel=0.4)
    assert run.optim.learning_rate == 2.5e-4
    assert "the paper's: " not in file.read_text()
    today = as_file(new_experiment("mine", text, 3e7), file, text)
    named = re.findall("the paper's: (.*)", today)
    assert named == ["relative", "layernorm", "post", "relu"]


HYBRID = "model.layer_kinds=[deltanet, deltanet, deltanet, attention]"


@pytest.mark.parametrize("steps", [0, 300])
def test_settings_of_the_command_line_are_in_the_file_and_the_size_is_as_asked(steps, tmp_path):
    text = TrainingText(path=Path("c"), tokens=10**7, longest_document=9000, vocab_size=4000)
    overrides = [HYBRID, "optim.name=muon", "optim.schedule.decay_steps=7", "data.lanes=4"]
    run = new_experiment("mine", text, 3e6, steps=steps, overrides=overrides)
    assert run.model.num_layers % 4 == 0
    assert cost_of(run).parameters == pytest.approx(3e6, rel=0.4)
    file = tmp_path / "mine.yaml"
    file.write_text(as_file(run, file, text, overrides))
    found = load_config(RunConfig, file)
    assert found == replace(run, model=replace(run.model, vocab_size=0))
    assert found.model.num_deltanet_layers == 3 * found.model.num_attention_layers
    assert (found.optim.name, found.optim.schedule.decay_steps) == ("muon", 7)
    six = new_experiment("mine", text, 3e6, overrides=["model.num_layers=6"])
    assert six.model.num_layers == 6


@pytest.mark.parametrize("steps", [20, 300, 20_000])
def test_evaluations_take_at_most_a_tenth_of_a_run(steps):
    text = TrainingText(path=Path("c"), tokens=10**7, longest_document=900, vocab_size=4000)
    for overrides in ([], [HYBRID]):
        time = run_time(new_experiment("mine", text, 1e7, False, steps, overrides), 1, 1.0)
        assert time.evaluation is not None
        assert 0 < time.evaluation <= 0.1 * time.training


def test_a_new_experiment_trains_as_it_is_and_is_never_overwritten(
    corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    home = corpus.directory.parent
    assert main(["new", "tiny.yaml", "--corpus", str(home), "--parameters", "100k"]) == 0
    assert "launcher local tiny.yaml --ranks 2" in capsys.readouterr().out
    steps = ["optim.steps=2", "optim.schedule.warmup_steps=1", "evaluation.max_tokens=100"]
    settings = [*steps, "engine.kind=torch", "metrics.tensorboard=false"]
    assert main(["train", "tiny.yaml", *settings, "--run-dir", "runs/tiny"]) == 0
    assert RunDir.open(tmp_path / "runs" / "tiny").read_metrics()[-1]["step"] == 2
    written = (tmp_path / "tiny.yaml").read_text()
    for arguments, message in (
        (["tiny.yaml", "--corpus", str(home)], "tiny.yaml"),
        (["b", "--corpus", str(home)], "b.yaml"),
        (["b.yaml", "--corpus", "nowhere"], f"{tmp_path}/nowhere/train"),
        (["b.yaml", "--corpus", str(home), "--parameters=1k"], "9.6k"),
        (["b.yaml", "--corpus", str(home), "--parameters=much"], "4k or 10M"),
        (["b.yaml", "--corpus", str(home), "--steps=0"], "--steps=0"),
        (["b.yaml", "--corpus", str(home), "optim.stepz=20"], "'steps'"),
        (["b c.yaml", "--corpus", str(home)], "'b c'"),
    ):
        capsys.readouterr()
        assert main(["new", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert (tmp_path / "tiny.yaml").read_text() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "tiny.yaml"]
