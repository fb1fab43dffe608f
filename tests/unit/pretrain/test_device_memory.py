"""What `describe` says a step needs, against what it really took."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from data_pipeline.config_loader import to_tree
from pretrain.cli import main
from pretrain.config.data import DataConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import memory_parts, total_bytes

DEEP = {"vocab_size": 1000, "num_layers": 8, "d_model": 256, "num_heads": 4, "memory_length": 128}
LONG = {"vocab_size": 500, "num_layers": 4, "d_model": 128, "num_heads": 4, "memory_length": 512}
WORDY = {"vocab_size": 16000, "num_layers": 2, "d_model": 128, "num_heads": 4, "memory_length": 64}
MODERN = {
    "positions": "rope",
    "feed_forward": "swiglu",
    "norm": "rmsnorm",
    "norm_position": "pre",
    "num_key_heads": 2,
}
CASES = {
    "deep": (DEEP, (8, 128), {}),
    "deep, checkpointed": (DEEP, (8, 128), {"activation_checkpointing": "full"}),
    "long memory": (LONG, (4, 512), {}),
    "long memory, checkpointed": (LONG, (4, 512), {"activation_checkpointing": "full"}),
    "long memory, scores computed again": (
        LONG,
        (4, 512),
        {"activation_checkpointing": "selective"},
    ),
    "deep, every second layer": (
        DEEP,
        (8, 128),
        {"activation_checkpointing": "full", "checkpoint_every_n_layers": 2},
    ),
    "long memory, plain attention": (LONG, (4, 512), {"attention_kernel": "plain"}),
    "many words": (WORDY, (16, 64), {}),
    "many words, output layer in chunks": (WORDY, (16, 64), {"logits_chunk_tokens": 128}),
    "slots": (DEEP, (8, 128), {"micro_batch_lanes": 2}),
    "dropout": ({**DEEP, "dropout": 0.1, "attention_dropout": 0.1}, (8, 128), {}),
    "today's parts": ({**DEEP, **MODERN}, (8, 128), {}),
}


def run_of(name: str) -> RunConfig:
    model, (lanes, segment_length), engine = CASES[name]
    data = DataConfig(lanes=lanes, segment_length=segment_length)
    return RunConfig(
        model=ModelConfig(**model),
        data=data,
        engine=EngineConfig(kind="torch", threads=1, **engine),
    )


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    """Peak bytes of every case, from one process of its own."""
    settings = json.dumps([to_tree(run_of(name)) for name in CASES])
    command = [sys.executable, "-m", "tests.helpers.peak_memory", settings]
    # Freed memory goes back at once, so that the process holds what the tensors hold.
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_of_a_steps_peak_memory_is_within_15_per_cent(measured, name):
    assert total_bytes(memory_parts(run_of(name), 1)) == pytest.approx(measured[name], rel=0.15)


def test_a_model_that_no_memory_can_hold_is_refused_before_it_is_drawn(corpus, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        f"data: {{path: {corpus.directory.parent}, lanes: 1}}\n"
        "model: {d_model: 65536, num_layers: 100}\n"
    )
    command = ["train", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(r"a model of [\d,]+ parameters takes [\d,.]+ GiB of this node", said)
    assert not (tmp_path / "run").exists()
