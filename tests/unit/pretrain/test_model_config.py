"""The adaptive settings of a model that contradict each other are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from data_pipeline.errors import ConfigError
from pretrain.config import ModelConfig
from pretrain.model.transformer_xl import TransformerXL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 50, "cutoffs": (20, 50)}, r"cutoffs=\[20, 50\].*50 tokens"),
        ({"vocab_size": 50, "cutoffs": (20, 10)}, "must rise"),
        ({"cutoffs": (0,)}, "above 0"),
        ({"vocab_size": 50, "cutoffs": (10, 20), "d_embed": 8, "div_val": 3}, "down to nothing"),
        ({"div_val": 0}, "div_val=0"),
        ({"cutoffs": (10,), "tie_projections": (True,)}, "has 1 entries; expected 2"),
        ({"d_model": 7}, "odd"),
        ({"same_length": True, "memory_length": 0}, "same_length needs"),
        ({"dropout": 1.0}, "below 1"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**options)


def test_cutoffs_are_accepted_before_the_vocabulary_is_known() -> None:
    assert ModelConfig(cutoffs=(10, 20), div_val=2).cutoffs == (10, 20)


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size=0"):
        TransformerXL(ModelConfig())
