"""What of an adopted model needs no transformers: its facts, and the refusal of an old version."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foundation.errors import ConfigError
from foundation.typed_values import to_tree
from pretrain.cli import main
from pretrain.config.adopted import AdoptedFacts, AdoptedWeight, CachedPart
from pretrain.config.lane_parts import lane_parts
from pretrain.config.model import ModelConfig
from pretrain.config.run import DataConfig, OptimConfig, RunConfig
from pretrain.costs.device_memory import lane_bytes
from pretrain.costs.flops import parameter_counts, token_flops
from pretrain.model.memory import MemoryLayout
from tests.helpers.checkout import ROOT

FACTS = AdoptedFacts(
    family="SomeForCausalLM",
    transformers="5.24.0",
    config={"model_type": "some"},
    parts=(
        CachedPart(
            layers=(0, 2), name="conv_states.0", kind="state", shape=(6, 4), in_float32=False
        ),
        CachedPart(
            layers=(0, 2), name="recurrent_states.0", kind="state", shape=(2, 3), in_float32=True
        ),
        CachedPart(layers=(1,), name="keys", kind="rows", shape=(2, 4), in_float32=False, window=8),
    ),
    weights=(
        AdoptedWeight(part="layers", role="matrix", rows=4, columns=4, copies=3),
        AdoptedWeight(part="embedding", role="table", rows=50, columns=4, copies=1),
    ),
    flops_per_token=100.0,
    flops_per_pair=2.0,
    kept_per_token=64.0,
)
MODEL = ModelConfig(
    vocab_size=50, num_layers=4, d_model=4, memory_length=32, adopted=to_tree(FACTS)
)
RUN = RunConfig(model=MODEL, initial_weights=Path("hf"), data=DataConfig(segment_length=16))


def test_lanes_carry_what_the_facts_list_and_no_more_rows_than_a_window():
    parts = lane_parts(MODEL)
    assert [len(of_layer) for of_layer in parts.layers] == [2, 1, 2, 0]
    assert [part.length for part in parts] == [0, 0, 8, 0, 0, 32]
    states, rows, documents = 2 * (24 * 2 + 6 * 4), 8 * 8 * 2, 32 * 4
    half = replace(RUN, engine=replace(RUN.engine, precision="bf16"))
    assert lane_bytes(half) == states + rows + documents


def test_the_memory_of_a_layer_that_carries_nothing_has_no_norm():
    layout = MemoryLayout(MODEL)
    vectors = layout.vectors(layout.empty(2, torch.zeros(())))
    assert [tuple(part.shape) for part in vectors] == [(2, 1, 24), (2, 0, 8), (2, 1, 24), (2, 0, 1)]
    assert all(torch.linalg.vector_norm(part, dim=-1).sum() == 0 for part in vectors)


def test_costs_follow_from_the_facts():
    counts = parameter_counts(MODEL)
    assert (counts.total, counts.body) == (48 + 200, 48)
    flops = token_flops(MODEL, segment_length=16, lanes=2)
    assert flops.forward == 100 + 2 * (16 + 32) + 2 * 50 * 4
    assert flops.training == 3 * flops.forward


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 8}, "own family"),
        ({"memory_length": (8, 8)}, "one number"),
        ({"adopted": {**to_tree(FACTS), "parts": 3}}, "write it with `pretrain adopt`"),
    ],
)
def test_other_settings_of_a_model_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        replace(MODEL, **change)


def test_segments_that_teach_each_other_need_whole_weights():
    engine, optim = replace(RUN.engine, zero_stage=3), OptimConfig(gradient_segments=2)
    with pytest.raises(ConfigError, match="zero_stage of 2 or less"):
        replace(RUN, engine=engine, optim=optim)


def test_what_is_not_a_checkpoint_is_refused_in_one_line(tmp_path, corpus, capsys):
    adopt = ["adopt", str(tmp_path), "--corpus", str(corpus.directory.parent)]
    for content, words in (
        (None, "has no config.json"),
        ("{", "is corrupted"),
        ("[1]", "expected an object"),
        ("{}", "names no model_type"),
        ('{"model_type": "some", "quantization_config": {"bits": 4}}', "quantized"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        assert main([*adopt, "--output", str(tmp_path / "mine.yaml")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


def test_an_old_version_of_transformers_is_named_in_one_line(tmp_path):
    package = tmp_path / "old" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '4.57.6'\n")
    code = "from pretrain.model.transformers_modules import library\nwith library(): pass"
    environment = {"PYTHONPATH": f"{tmp_path / 'old'}:{ROOT}", "PATH": ""}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "found transformers 4.57.6; models of others need 5.23" in ended.stderr
