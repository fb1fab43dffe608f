"""The script of docs/python.md runs as it stands, on a model and a corpus of our own."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import data_pipeline
import pretrain
from data_pipeline import Corpus
from pretrain.config.run import DataConfig, ModelConfig, RunConfig
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.export import write_export

PAGE = Path(__file__).parents[4] / "docs" / "python.md"
NOTEBOOK = PAGE.parents[1] / "examples" / "memory.py"
TEXT = "entry 7: naïve → words that are scored over several segments\n" * 3


def test_the_page_loads_scores_and_generates(corpus, tmp_path, monkeypatch, capsys):
    torch.manual_seed(1)
    model = ModelConfig(vocab_size=320, num_layers=2, d_model=16, num_heads=2, memory_length=24)
    config = RunConfig(model=model, data=DataConfig(segment_length=16))
    module = TransformerXL(model)
    monkeypatch.chdir(tmp_path)
    write_export(tmp_path / "runs" / "mine", module, config, 7, corpus.directory.parent)
    shutil.copytree(corpus.directory.parent, tmp_path / "data" / "mine")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    script = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
    names: dict[str, Any] = {}
    exec(compile(script, PAGE.name, "exec"), names)

    end = names["tokenizer"].end_id
    ids = torch.tensor([names["tokenizer"].encode(TEXT).tolist()])
    inputs, targets = (torch.nn.functional.pad(ids, side, value=end) for side in ((1, 0), (0, 1)))
    assert inputs.shape[1] > 4 * 16
    stream = new_stream(module.eval(), 24, 16)
    parts = zip(inputs.split(16, dim=1), targets.split(16, dim=1), strict=True)
    known = torch.cat([stream.nll_BL(*part) for part in parts], dim=1).mean().item()
    assert names["loss"] == pytest.approx(known, rel=1e-5)
    out = capsys.readouterr().out
    assert out.startswith("step 7, ")
    assert f"{names['bits_per_byte']:.3f} bits" in out
    assert f"The {names['continuation']}" in out
    assert names["small"].head is not None
    train = Corpus.open(tmp_path / "data" / "mine" / "train")
    assert names["corpus"].num_documents == train.num_documents
    last, following = names["batch"], next(names["again"])
    assert last.tokens_BL.shape == (2, 16)
    assert (following.tokens_BL[:, 0] == last.targets_BL[:, -1]).all()
    assert names["nll"].shape == (2, 16)
    assert names["memory"][0].shape == (2, 24, 16)


def test_the_notebook_reads_documents_in_pieces_with_memory_and_without(corpus, tmp_path):
    model = ModelConfig(vocab_size=320, num_layers=2, d_model=16, num_heads=2, memory_length=24)
    model = replace(model, init_std=0.5)  # untrained, a memory should move the loss all the same
    config = RunConfig(model=model, data=DataConfig(segment_length=16))
    module = TransformerXL(model)
    write_export(tmp_path / "run", module, config, 7, corpus.directory.parent)
    words = [NOTEBOOK, tmp_path / "run", corpus.directory.parent, tmp_path / "memory.png"]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = re.search(r"([\d,]+) tokens: loss ([\d.]+) with memory, ([\d.]+) without", run.stdout)
    assert said
    documents = corpus.num_documents
    assert int(said[1].replace(",", "")) == corpus.num_tokens - documents
    assert said[2] != said[3]
    assert (tmp_path / "memory.png").stat().st_size > 5000


def test_the_names_of_the_packages_are_there_and_importing_them_loads_nothing_heavy():
    for package in (pretrain, data_pipeline):
        assert all(getattr(package, name) for name in package.__all__)
        with pytest.raises(AttributeError, match="'Transformer'"):
            _ = package.Transformer
    code = """
import sys
import data_pipeline, pretrain
ours = [name for name in sys.modules if name.startswith(("pretrain", "data_pipeline"))]
assert sorted(ours) == ["data_pipeline", "pretrain"], ours
assert not {"torch", "numpy", "yaml", "pydantic"} & set(sys.modules)
from pretrain import RunConfig
assert "torch" not in sys.modules
from pretrain import TransformerXL, generate, load_trained
from data_pipeline import Corpus, LaneStream
assert "torch" in sys.modules
assert not {"deepspeed", "streaming", "transformers", "triton.language", "rich"} & set(sys.modules)
import pretrain.commands.evaluation_outputs, pretrain.run
assert "lm_eval" not in sys.modules, "an extra"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
