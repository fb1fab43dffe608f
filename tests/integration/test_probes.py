"""`pretrain evaluate --probe`: the numbers, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch

from data_pipeline.tokenizer import Tokenizer
from pretrain.cli import main
from pretrain.config.run import DataConfig, RunConfig
from pretrain.scaling.collect import probe_columns
from pretrain.weights.export import write_export
from tests.helpers.models import tiny_model

ALL = ("needle", "copy", "position", "attention")


@pytest.fixture(scope="module")
def export(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probes") / "model"
    vocab_size = Tokenizer.load(tiny_corpus / "tokenizer").vocab_size
    module = tiny_model(dtype=torch.float32, vocab_size=vocab_size).eval()
    config = RunConfig(model=module.config, data=DataConfig(path=tiny_corpus, segment_length=8))
    write_export(folder, module, config, 7, tiny_corpus)
    return folder


def test_all_probes_make_a_table_and_a_file_of_numbers(export, tiny_corpus, tmp_path, capsys):
    data = ["--data", str(tiny_corpus), "--max-tokens", "600"]
    command = ["evaluate", str(export), *data, "--probe", *ALL, "--trials", "5"]
    assert main([*command, "--output", str(tmp_path / "a")]) == 0
    table = capsys.readouterr().out
    assert main([*command, "--output", str(tmp_path / "b"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = [json.loads((tmp_path / name / "probes.json").read_text()) for name in "ab"]
    assert written[0] == written[1] == printed, "the same numbers each time"
    assert set(printed["probes"]) == set(ALL)
    assert {"needle_distance", "copy_accuracy", "attention_to_memory"} <= {*printed["summary"]}
    for name in ALL:
        assert re.search(rf"^{name} ", table, re.MULTILINE), name
    assert main(["evaluate", str(export), *data, "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["results"][0]
    assert printed["probes"]["position"][0]["loss"] == evaluated["loss"]


@pytest.mark.parametrize(
    "flags",
    [[], ["--probe", *ALL, "--trials", "3"], ["--context-length", "--longest-context", "8"]],
)
def test_a_model_is_measured_in_the_precision_given(export, tiny_corpus, tmp_path, capsys, flags):
    command = ["evaluate", str(export), "--data", str(tiny_corpus), "--json", *flags]
    output = ["--output", str(tmp_path)] if "--probe" in flags else []
    found = []
    for precision in ("fp32", "bf16"):
        assert main([*command, *output, "--precision", precision]) == 0
        found.append(json.loads(capsys.readouterr().out))
    if not flags:
        exact, rounded = (each["results"][0]["loss"] for each in found)
        assert 0 < abs(exact - rounded) < 0.01 * exact


def test_needle_and_copy_of_an_export_need_no_corpus(export, tmp_path, capsys):
    command = ["evaluate", str(export), "--probe", "needle", "copy", "--trials", "3", "--json"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["text"] == ""
    assert {each["trials"] for each in found["probes"]["copy"]} == {3}
    assert [each["distance"] for each in found["probes"]["needle"]] == [8, 16, 24, 32]
    columns = {f"probes/{name}" for name in ("needle/8", "needle/16", "needle/32", "chance")}
    assert probe_columns(tmp_path).keys() == columns, "of one probe, too"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--probe", "needle"], "--output"),
        (["--probe", "attention", "--output", "x"], "--data"),
        (["--probe", "copy", "--longest-distance", "7", "--output", "x"], "is 7, expected 8"),
    ],
)
def test_the_unmeasurable_is_refused_in_a_line(export, tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(export), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing is written"
