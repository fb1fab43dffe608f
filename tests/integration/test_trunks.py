"""`scale plan --trunks`: a run that continues a shorter one ends as if it was trained alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foundation.files import write_text
from launcher.cli import main as launcher
from pretrain.cli import main as pretrain
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.sweep_file import config_of, read_sweep


@pytest.fixture(scope="module")
def trained(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trunks.yaml, whose cells are trained in runs/trunks."""
    folder = tmp_path_factory.mktemp("trunks")
    write_text(
        folder / "tiny.yaml",
        f"""name: tiny
model: {{num_layers: 2, d_model: 16, num_heads: 4, memory_length: 8, dropout: 0.1}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{learning_rate: 4e-3}}
engine: {{kind: torch}}
evaluation: {{max_tokens: 200}}
metrics: {{interval: 1, tensorboard: false}}
""",
    )
    with pytest.MonkeyPatch.context() as here:
        here.chdir(folder)
        plan = ["scale", "plan", "tiny.yaml", "--budgets", "3e8", "6e8", "--sizes", "2"]
        plan += ["--spread", "2", "--tokens-per-parameter", "0.6", "--rule", "base"]
        flags = ["--trunks", "--no-checks"]
        assert pretrain([*plan, *flags, "--output", "trunks.yaml"]) == 0
        assert launcher(["sweep", "submit", "trunks.yaml", "--local", "-j2"]) == 0
    return folder


def state(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    files = run.checkpoints.glob(f"step-{step:08}/*.safetensors")
    return {key: value for file in files for key, value in load_file(file).items()}


def test_branches_equal_runs_that_were_trained_alone_with_their_schedule(trained, monkeypatch):
    monkeypatch.chdir(trained)
    cells = read_sweep(Path("trunks.yaml")).cells
    branches = [cell for cell in cells if cell.starts_from]
    assert branches
    for cell in branches:
        config = config_of(cell, Path("trunks.yaml"))
        steps = config.optim.steps
        assert 0 < cell.starts_at < steps
        branch, alone = RunDir(Path("runs/trunks") / cell.name), RunDir(Path("alone") / cell.name)
        train = ["train", "tiny.yaml", *cell.overrides, "--run-dir", str(alone.path)]
        assert pretrain(train) == 0
        torch.set_flush_denormal(False)  # training sets it for its process
        lines = [
            [(line["kind"], line["step"], line["loss"]) for line in run.read_metrics()]
            for run in (branch, alone)
        ]
        assert lines[0] == lines[1]
        assert len(lines[0]) > steps
        found, expected = state(branch, steps), state(alone, steps)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


def test_runs_of_one_shape_share_their_beginning_and_the_plan_says_what_that_saves(
    trained, monkeypatch, capsys
):
    monkeypatch.chdir(trained)
    sweep = read_sweep(Path("trunks.yaml"))
    (note,) = (note for note in sweep.notes if note.startswith("trunks: "))
    saved = re.search(r", (\d+)% saved", note)
    assert saved
    assert int(saved[1]) > 10
    by_name = {cell.name: cell for cell in sweep.cells}
    for cell in sweep.cells:
        run = config_of(cell, Path("trunks.yaml"))
        assert run.optim.schedule.shape == "wsd"
        if cell.starts_from:
            shorter = config_of(by_name[cell.starts_from], Path("trunks.yaml"))
            assert cell.starts_at == shorter.optim.steps - shorter.optim.decay_steps
            assert shorter.checkpoint.keep_every == cell.starts_at
            assert shorter.model == run.model
    assert launcher(["sweep", "submit", "trunks.yaml", "--local"]) == 0
    assert f"{len(by_name)} of {len(by_name)} cells are done" in capsys.readouterr().out
    assert pretrain(["scale", "collect", "trunks.yaml"]) == 0
    assert f"{len(by_name)} of {len(by_name)} cells have a final loss" in capsys.readouterr().out
