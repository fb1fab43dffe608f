"""Evaluation with memory against a sliding window: attention lengths, FLOPs, measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foundation.errors import ConfigError
from pretrain.config.model import ModelConfig
from pretrain.evaluation.sliding_window import attention_lengths, compare
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL

CONFIG = ModelConfig(vocab_size=50, num_layers=2, d_model=32, num_heads=2, memory_length=48)


def test_the_papers_lengths_are_scaled_to_the_training_memory() -> None:
    assert attention_lengths(replace(CONFIG, memory_length=768), 128) == [800, 1800, 2800, 3800]
    assert attention_lengths(replace(CONFIG, memory_length=384), 128) == [400, 900, 1400, 1900]
    with pytest.raises(ConfigError, match="has none"):
        attention_lengths(replace(CONFIG, memory_length=0), 128)


@pytest.mark.parametrize("positions", ["relative", "rope"])
def test_memory_saves_what_its_flops_say(positions) -> None:
    module = TransformerXL(replace(CONFIG, positions=positions)).eval()
    speeds = compare(module, attention_length=64, segment_length=16, seconds=0.05)
    assert (
        speeds.ratio > 2.0
    )  # of so small a model mostly the 16 tokens that one call predicts instead of one
    assert speeds.by_flops == pytest.approx(counted_ratio(module), rel=0.15)


def counted_ratio(module: TransformerXL) -> float:
    """FLOPs per predicted token of both ways as PyTorch counts them, window over cache."""
    tokens_BL = torch.zeros(1, 16, dtype=torch.long)
    stream = new_stream(module, 48, 16)
    for _ in range(3):
        stream.nll_BL(tokens_BL, tokens_BL)
    with FlopCounterMode(display=False) as cached:
        stream.nll_BL(tokens_BL, tokens_BL)
    with FlopCounterMode(display=False) as window, torch.no_grad():
        hidden_BLD, _, _ = module.hidden_states(
            torch.zeros(1, 64, dtype=torch.long), memory_length=0
        )
        module.head(hidden_BLD[:, -1:], tokens_BL[:, :1])
    return window.get_total_flops() / (cached.get_total_flops() / 16)


def test_no_room_for_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="must exceed the segment length"):
        compare(TransformerXL(CONFIG), attention_length=16, segment_length=16)
