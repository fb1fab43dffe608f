"""A trained run, exported: bitwise the same logits, in all commands that read runs."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from foundation.settings import load_config
from pretrain.cli import main
from pretrain.config.resolve import resolve
from pretrain.config.run import RunConfig
from pretrain.rundir.events import SettingsChanged
from pretrain.rundir.run_dir import RunDir
from pretrain.weights.export import load_export, load_trained
from tests.helpers.checkpoints import flip_a_bit
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.full_disk import full_disk
from tests.helpers.models import random_tokens
from tests.helpers.owners import give_away


@pytest.fixture(scope="module")
def exported(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("export")
    (folder / "tiny.yaml").write_text(
        f"""model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 8, positions: rope}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: 20}}
engine: {{kind: torch}}
evaluation: {{interval: 0, max_tokens: 200}}
metrics: {{tensorboard: false}}
"""
    )
    assert main(["train", str(folder / "tiny.yaml"), f"--run-dir={folder / 'run'}"]) == 0
    assert main(["export", str(folder / "run"), f"--output={folder / 'out'}"]) == 0
    return folder / "run", folder / "out"


def test_the_export_has_the_runs_logits_bit_for_bit(exported):
    run, output = exported
    of_run = load_trained(run, torch.device("cpu"))
    module, config, step = load_export(output)
    tokens_BL = random_tokens(2, 12, vocab_size=config.model.vocab_size)
    with torch.no_grad():
        expected, _ = of_run.module.logits_BLV(tokens_BL)
        found, _ = module.logits_BLV(tokens_BL)
    assert torch.equal(found, expected)
    assert step == of_run.step == 20


@pytest.mark.parametrize("layout", ["own", "huggingface"])
def test_a_full_disk_is_a_line_and_leaves_nothing_of_an_export(exported, tmp_path, capsys, layout):
    run, _ = exported
    output = tmp_path / "out"
    with full_disk(100_000 if layout == "huggingface" else 0):  # the code of the model fits
        assert main(["export", str(run), "--output", str(output), "--format", layout]) == 2
    assert capsys.readouterr().err.startswith(f"error: {output}: ")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused(exported, capsys):
    run, output = exported
    assert main(["export", str(run), "--output", str(output)]) == 2
    assert str(output) in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["own", "huggingface", "checkpoint"])
def test_a_new_run_starts_from_the_weights_of_an_export_or_a_checkpoint(exported, tmp_path, layout):
    """A learning rate that moves nothing: what comes out is what went in."""
    run, own = exported
    output = Path(f"{run}@last") if layout == "checkpoint" else tmp_path / "start"
    if layout != "checkpoint":
        assert main(["export", str(run), "--output", str(output), "--format", layout]) == 0
    settings = ["engine.kind=deepspeed", "engine.zero_stage=3", f"initial_weights={output}"]
    settings += ["optim.steps=2", "optim.learning_rate=1e-30"]
    train = ["train", str(run.parent / "tiny.yaml"), f"--run-dir={tmp_path / 'run'}", *settings]
    run_ranks(1, partial(main, train), tmp_path)
    after = load_trained(tmp_path / "run", torch.device("cpu")).module
    for name, parameter in load_export(own)[0].named_parameters():
        assert torch.equal(after.get_parameter(name), parameter), name


def test_a_new_experiment_has_the_model_of_its_initial_weights(exported, tiny_corpus, tmp_path):
    run, own = exported
    for number, weights in enumerate((own, f"{run}@last")):
        file = tmp_path / f"new{number}.yaml"
        words = ["new", str(file), "--corpus", str(tiny_corpus), f"initial_weights={weights}"]
        assert main([*words, "engine.kind=torch", "optim.steps=1"]) == 0
        new = resolve(load_config(RunConfig, file))
        assert new.model == RunDir(run).config.model
        assert main(["train", str(file), f"--run-dir={tmp_path / str(number)}"]) == 0


def test_weights_of_another_model_are_refused(exported, tmp_path, capsys):
    run, output = exported
    train = ["train", str(run.parent / "tiny.yaml"), f"--run-dir={tmp_path / 'run'}"]
    train.append("model.d_model=16")
    assert main([*train, f"initial_weights={output}"]) == 2
    assert str(output) in capsys.readouterr().err
    assert main([*train, f"initial_weights={run}@last"]) == 2
    assert f"use the model settings in {run / 'config.yaml'}" in capsys.readouterr().err
    assert main([*train, f"initial_weights={run}@7000"]) == 2
    assert "initial_weights: " in (said := capsys.readouterr().err)
    assert "no usable checkpoint of step 7000; name one" in said
    assert main([*train, f"initial_weights={tmp_path}"]) == 2
    assert "'pretrain export'" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main([*train, f"initial_weights={tmp_path}"]) == 2
    assert "'llama' of Hugging Face" in capsys.readouterr().err


def test_evaluate_answers_for_a_run_and_its_export_alike(exported, tiny_corpus, capsys):
    command = ["evaluate", *map(str, exported), "--data", str(tiny_corpus)]
    command += ["--memory-length", "4", "8", "--json"]
    assert main([*command, "--same-length"]) == 0
    of_run, of_export = json.loads(capsys.readouterr().out)
    for mine, its in zip(of_run["results"], of_export["results"], strict=True):
        assert mine["loss"] == its["loss"] > 0.0
        assert mine["lanes"] == its["lanes"] > 1
    assert [result["memory_length"] for result in of_run["results"]] == [4, 8]
    assert main(["evaluate", str(exported[0]), "--lanes", "3", "--rope-extension", "ntk"]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert ", 3 lanes, " in title
    assert title.endswith(" ntk")
    assert main(["evaluate", str(exported[0]), "--clamp", "4"]) == 2
    assert "positions=rope" in capsys.readouterr().err


def test_a_corpus_without_validation_needs_split_train(exported, tiny_corpus, tmp_path, capsys):
    for name in ("train", "tokenizer"):
        shutil.copytree(tiny_corpus / name, tmp_path / name)
    command = ["evaluate", str(exported[1]), "--data", str(tmp_path), "--max-tokens=64"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"error: --data={tmp_path} " in error
    assert "--split train" in error
    assert main([*command, "--split", "train"]) == 0
    whole = capsys.readouterr().out.splitlines()[-1]
    command[3] = str(tmp_path / "train")
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:6] == whole.split()[:6]


def test_context_lengths_of_two_models_are_measured_together(exported, capsys):
    run = str(exported[0])
    assert main(["evaluate", run, run, "--context-length", "--longest-context", "16"]) == 0
    text = capsys.readouterr().out
    assert text.count("context length") == 4  # a title and a head each


def test_a_flipped_bit_in_an_exports_weights_is_noticed(exported, tmp_path, capsys):
    out = Path(shutil.copytree(exported[1], tmp_path / "out"))
    weights = out / "model.safetensors"
    assert weights.stat().st_mode & 0o777 == (out / "config.json").stat().st_mode & 0o777
    flip_a_bit(weights)
    assert main(["generate", str(out), "--tokens", "1"]) == 2
    assert "model.safetensors" in capsys.readouterr().err


def rewrite(config: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change config.json and its hash: consistent, whoever wrote it."""
    tree = json.loads(config.read_text())
    change(tree)
    content = {name: value for name, value in tree.items() if name != "hash"}
    text = json.dumps(content, sort_keys=True)
    config.write_text(json.dumps({**content, "hash": hashlib.sha256(text.encode()).hexdigest()}))


def enlarge(config: Path, **settings: int) -> None:
    rewrite(config, lambda tree: tree["run"]["model"].update(settings))


def a_pipe_for(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def more_heads(config: Path) -> None:
    config.write_text(config.read_text().replace('"num_heads": 2', '"num_heads": 4'))


# A file of an export, what somebody could do to it, and what is said about it unless that is named.
FORGED: list[tuple[str, Callable[[Path], object], str]] = [
    ("tokenizer/tokenizer.json", lambda path: path.write_text("{}"), ""),
    ("tokenizer/tokenizer.model", lambda path: path.write_bytes(b"x"), ""),
    ("tokenizer/tokenizer.json", lambda path: shutil.rmtree(path.parent), ""),
    ("tokenizer/tokenizer.json", a_pipe_for, ""),
    ("config.json", more_heads, ""),
    ("config.json", partial(enlarge, num_layers=10**7), "num_layers=10000000"),
    ("config.json", partial(enlarge, num_layers=4096, d_model=4096), "model.safetensors"),
]


@pytest.mark.parametrize(("file", "forge", "said"), FORGED)
def test_a_forged_export_is_refused_before_any_draw(exported, tmp_path, capsys, file, forge, said):
    out = Path(shutil.copytree(exported[1], tmp_path / "out"))
    forge(out / file)
    assert main(["generate", str(out), "--tokens", "1"]) == 2
    error = capsys.readouterr().err
    assert (said or file) in error
    assert len(error.splitlines()) == 1


def test_an_export_chooses_no_host_to_contact_and_no_place_of_a_cache(exported, tmp_path, capsys):
    out, cache = shutil.copytree(exported[1], tmp_path / "out"), tmp_path / "cache"
    data = {"path": "http://127.0.0.1:9/corpus", "cache": {"directory": str(cache)}}
    rewrite(out / "config.json", lambda tree: tree["run"]["data"].update(data))
    assert main(["evaluate", str(out)]) == 2
    error = capsys.readouterr().err
    assert "--data" in error
    assert len(error.splitlines()) == 1
    assert load_trained(out).config.data.cache.directory is None
    assert not cache.exists()


def test_a_foreign_run_chooses_no_host(exported, tiny_corpus, tmp_path, capsys, monkeypatch):
    run, cache = shutil.copytree(exported[0], tmp_path / "run"), tmp_path / "cache"
    config, ledger = run / "config.yaml", RunDir(run).ledger
    tree = yaml.safe_load(config.read_text())
    tree["data"] |= {"path": "http://127.0.0.1:9/corpus", "cache": {"directory": str(cache)}}
    config.write_text(yaml.safe_dump(tree))
    ledger.append(SettingsChanged(changes={}, run_settings=tree))
    give_away(ledger.path, monkeypatch)
    for command in (["evaluate"], ["generate"], ["export", f"--output={tmp_path / 'out'}"]):
        assert main([command[0], str(run), *command[1:]]) == 2
        error = capsys.readouterr().err
        assert str(run) in error
        assert "--data" in error
    give_away(config, monkeypatch)
    assert main(["describe", str(run)]) == 2
    assert "data.path=http://127.0.0.1:9/corpus" in capsys.readouterr().err
    assert not cache.exists()
    assert main(["export", str(run), f"--output={tmp_path / 'out'}", f"--data={tiny_corpus}"]) == 0
