"""What `engine.compile` compiles: all layers share the code. static.json has what it saves."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from foundation.errors import ConfigError
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from tests.helpers.compiled_layer import between_attentions, layers_of

MODERN = ModelConfig(
    vocab_size=64, num_layers=2, d_model=64, num_heads=4, d_head=16, num_key_heads=2, d_inner=128,
    positions="rope", norm="rmsnorm", norm_position="pre", feed_forward="swiglu",
    query_key_norm=True, dropout=0.0, memory_length=8,
)  # fmt: skip


@pytest.mark.slow
def test_all_layers_share_the_compiled_code_without_a_graph_break() -> None:
    layers = layers_of(MODERN)
    for layer in layers:
        layer.compiles = True
    between_attentions(MODERN, layers[0])
    known = counters["stats"]["unique_graphs"]
    assert known
    between_attentions(MODERN, layers[1])
    assert counters["stats"]["unique_graphs"] == known
    with torch.no_grad():  # an evaluation, whose memory may have any length
        between_attentions(MODERN, layers[1], rows=5)
    assert counters["stats"]["unique_graphs"] == known
    assert not counters["graph_break"]


def test_a_model_with_dropout_cannot_be_compiled() -> None:
    with pytest.raises(ConfigError, match=r"model\.dropout"):
        RunConfig(engine=EngineConfig(compile=True), model=ModelConfig(dropout=0.1))
