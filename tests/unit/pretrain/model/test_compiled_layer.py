"""What `engine.compile` compiles: all layers share the code. static.json has what it saves."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foundation.errors import ConfigError
from pretrain.config.run import ModelConfig
from pretrain.model import compiled
from pretrain.model.transformer_xl import TransformerXL
from pretrain.model.visibility import SegmentKeys
from tests.helpers.compiled_layer import between_attentions, layers_of

MODERN = ModelConfig(
    vocab_size=64, num_layers=2, d_model=64, num_heads=4, d_head=16, num_key_heads=2, d_inner=128,
    positions="rope", norm="rmsnorm", norm_position="pre", feed_forward="swiglu",
    query_key_norm=True, dropout=0.0, memory_length=8,
)  # fmt: skip


@pytest.mark.slow
def test_all_layers_share_the_compiled_code_without_a_graph_break() -> None:
    from torch._dynamo.utils import counters  # late: it takes as long as torch itself

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


@pytest.mark.slow
def test_more_shapes_than_are_compiled_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_COMPILED", 1)
    torch._dynamo.reset()
    layer = layers_of(MODERN)[0]
    layer.compiles = True
    between_attentions(MODERN, layer, rows=3)
    with pytest.raises(ConfigError, match=r"engine\.compile"):
        between_attentions(MODERN, layer, rows=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"isolate_documents": True},
        {"isolate_documents": True, "layer_kinds": ("deltanet", "mamba2")},
        {"layer_kinds": ("kda", "attention"), "z_loss": 0.1},
        {"memory_tokens": 2, "positions": "relative", "cutoffs": (20, 40)},
        {"softmax_scaling": "log_length", "norm": "layernorm", "compressed_length": 4},
    ],
    ids=lambda options: ", ".join(options),
)
def test_a_compiled_model_computes_what_it_does_eagerly(options: dict[str, Any]) -> None:
    config = replace(MODERN, **options)
    losses, gradients = [], []
    for compiles in (False, True):
        torch.manual_seed(0)
        module, memory, nll_BL = TransformerXL(config, compiles=compiles), None, torch.empty(0)
        for tokens_BL in torch.randint(64, (3, 2, 17)).unbind():  # memory fills meanwhile
            starts_BL = (torch.arange(16) == 5).expand(2, 16)
            nll_BL, memory = module(
                tokens_BL[:, :-1], tokens_BL[:, 1:], memory, starts_BL, num_segments=2
            )
            nll_BL.mean().backward()
        losses.append(nll_BL)
        gradients.append({name: each.grad for name, each in module.named_parameters()})
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_layers_with_the_same_keys_count_the_visible_ones_once() -> None:
    model = replace(MODERN, softmax_scaling="log_length")
    documents_BC = torch.zeros(2, 16, dtype=torch.int32)
    keys = SegmentKeys(model, torch.float32, [], documents_BC, 8)
    assert "num_visible_BL" in vars(keys.visibility(16, 8))  # before compiled layers read it
    assert keys.visibility(16, 8).num_visible_BL.tolist() == [list(range(9, 17))]
