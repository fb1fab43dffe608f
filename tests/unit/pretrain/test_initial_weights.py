from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import CheckpointError
from pretrain.config.data import DataConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.export import check_initial_weights, write_export

MODEL = ModelConfig(
    vocab_size=37, num_layers=2, d_model=16, num_heads=2, memory_length=8, positions="rope"
)


@pytest.fixture
def exported(tmp_path: Path) -> RunConfig:
    """A run that starts from the export of an equal one."""
    run = RunConfig(model=MODEL, data=DataConfig(path=tmp_path / "data"))
    write_export(tmp_path / "export", TransformerXL(MODEL), run, 5, tmp_path)
    return replace(run, initial_weights=tmp_path / "export")


# Each leaves names and shapes of the weights as they are.
OTHER_FUNCTIONS: list[dict[str, Any]] = [
    {"norm_position": "pre"},
    {"feed_forward": "gelu"},
    {"positions": "alibi"},
    {"num_heads": 4},
    {"same_length": True},
    {"isolate_documents": True},
]
SAME_FUNCTION: list[dict[str, Any]] = [
    {},
    {"dropout": 0.3, "attention_dropout": 0.2, "init_std": 0.5, "z_loss": 1e-4},
    {"memory_length": 64},
    {"d_head": 8, "d_inner": 64, "d_embed": 16, "num_key_heads": 2},
    {"compression_rate": 2},
]


@pytest.mark.parametrize("change", OTHER_FUNCTIONS, ids=str)
def test_weights_of_another_function_are_refused(exported, change):
    other = replace(exported, model=replace(MODEL, **change))
    name = next(iter(change))
    there, here = getattr(MODEL, name), getattr(other.model, name)
    with pytest.raises(CheckpointError, match=rf"model\.{name} .*{there} .*{here}"):
        check_initial_weights(other)


@pytest.mark.parametrize("change", SAME_FUNCTION, ids=str)
def test_settings_that_change_no_function_may_differ(exported, change):
    check_initial_weights(replace(exported, model=replace(MODEL, **change)))
