"""Settings of a model that contradict each other are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from foundation.errors import ConfigError
from pretrain.config.model import ModelConfig
from pretrain.model.transformer_xl import TransformerXL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 50, "cutoffs": (20, 50)}, r"cutoffs=\[20, 50\].*50 tokens"),
        ({"vocab_size": 50, "cutoffs": (20, 10)}, "must increase"),
        ({"cutoffs": (0,)}, "from 1"),
        ({"vocab_size": 50, "cutoffs": (10, 20), "d_embed": 8, "div_val": 3}, "to below 1"),
        ({"div_val": 0}, "div_val=0"),
        ({"cutoffs": (10,), "tie_projections": (True,)}, "has 1 entries; expected 2"),
        ({"d_model": 7}, "odd"),
        (
            {"layer_kinds": ("deltanet", "deltanet", "attention")},
            "layer_kinds=.*which do not repeat over num_layers=4",
        ),
        ({"same_length": True, "memory_length": 0}, "same_length needs"),
        ({"dropout": 1.0}, "below 1"),
        ({"positions": "rope", "clamp_length": 5}, "clamp_length belongs to positions=relative"),
        (
            {"positions": "alibi", "untie_biases": True},
            "untie_biases belongs to positions=relative",
        ),
        ({"positions": "rope", "d_head": 33}, "a head has 33"),
        ({"num_heads": 4, "num_key_heads": 3}, "does not divide into num_key_heads=3"),
        ({"num_heads": 4, "num_key_heads": 8}, "does not divide into num_key_heads=8"),
        (
            {"compressed_length": 8, "memory_length": 0},
            "compressed_length needs model.memory_length",
        ),
        ({"compressed_length": 8, "compression_rate": 0}, "compression_rate=0"),
        ({"compressed_length": 8, "memory_length": 2}, "compression_rate=3 is above"),
        ({"compressed_length": 8, "same_length": True}, "never the older compressed rows"),
        ({"z_loss": -1.0}, "z_loss=-1"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**options)


def test_odd_widths_are_accepted_where_nothing_is_halved() -> None:
    assert ModelConfig(positions="alibi", d_model=9, num_heads=3).head_width == 3
    assert ModelConfig(positions="rope", d_model=9, num_heads=1, d_head=4).head_width == 4


def test_swiglus_third_matrix_is_paid_for_by_its_width() -> None:
    assert ModelConfig(d_model=768, num_heads=12, feed_forward="swiglu").inner_width == 2048
    assert ModelConfig(d_model=100, feed_forward="swiglu").inner_width == 320
    assert ModelConfig(d_model=100, feed_forward="swiglu", d_inner=7).inner_width == 7


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size=0"):
        TransformerXL(ModelConfig())
