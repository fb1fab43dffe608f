"""A trained run, exported: the same logits in every bit, and the commands that read runs read exports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_pipeline.errors import CheckpointError
from pretrain.cli import main
from pretrain.exported import load_export
from pretrain.inference import load_trained


@pytest.fixture(scope="module")
def exported(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("export")
    (folder / "tiny.yaml").write_text(
        f"""model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 8, positions: rope}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: 20}}
engine: {{kind: torch, threads: 1}}
evaluation: {{interval: 0, max_tokens: 200}}
metrics: {{tensorboard: false}}
"""
    )
    command = [sys.executable, "-m", "pretrain"]
    subprocess.run([*command, "train", folder / "tiny.yaml", "--run-dir", folder / "run"], check=True, timeout=120)
    subprocess.run([*command, "export", folder / "run", "--output", folder / "out"], check=True, timeout=120)
    return folder / "run", folder / "out"


def test_the_export_has_the_runs_logits_bit_for_bit(exported):
    run, output = exported
    of_run = load_trained(run, torch.device("cpu"))
    module, config, step = load_export(output)
    tokens_BL = torch.randint(config.model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, _ = of_run.module.logits_BLV(tokens_BL)
        found, _ = module.logits_BLV(tokens_BL)
    assert torch.equal(found, expected)
    assert step == of_run.step == 20


def test_evaluate_and_generate_read_an_export(exported, tiny_corpus, capsys):
    run, output = exported
    assert main(["evaluate", str(output), "--data", str(tiny_corpus), "--json"]) == 0
    of_export = capsys.readouterr().out
    assert main(["evaluate", str(run), "--json"]) == 0
    of_run = capsys.readouterr().out
    assert of_export.split('"seconds"')[0] == of_run.split('"seconds"')[0]
    assert main(["generate", str(output), "--tokens", "5"]) == 0


def test_an_existing_output_is_refused_and_a_damaged_export_named(exported, tmp_path, capsys):
    run, output = exported
    assert main(["export", str(run), "--output", str(output)]) == 2
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes((output / "model.safetensors").read_bytes()[:-50])
    (tmp_path / "config.json").write_bytes((output / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        load_export(tmp_path)
