"""What `engine.compile` compiles: how many operations remain, and for how many shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.profiler import ProfilerActivity, profile

from foundation.errors import ConfigError
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.model.attention import RelativeAttention, compiled_if
from pretrain.model.attention_paths import Visibility
from pretrain.model.layer import ResidualLayer, TransformerLayer, layer_of

MODERN = ModelConfig(
    vocab_size=64, num_layers=2, d_model=64, num_heads=4, d_head=16, num_key_heads=2, d_inner=128,
    positions="rope", norm="rmsnorm", norm_position="pre", feed_forward="swiglu",
    query_key_norm=True, dropout=0.0, memory_length=8,
)  # fmt: skip
# Events that compute nothing.
IDLE = {
    "aten::" + name
    for name in (
        "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty",
        "reshape", "resolve_conj", "result_type", "select", "slice", "split", "t", "transpose",
        "to", "unsqueeze", "view", "_unsafe_view", "alias", "squeeze", "permute", "narrow",
        "_reshape_alias", "split_with_sizes", "unbind", "numpy_T", "unflatten", "chunk",
    )
}  # fmt: skip


def inputs_of(rows: int) -> tuple[Any, ...]:
    visibility = Visibility(
        num_queries=8, num_keys=8 + rows, dtype=torch.float32, device=torch.device("cpu")
    )
    hidden_BLD = torch.randn(2, 8, 64, requires_grad=True)
    memory_BMD, positions_CX = torch.randn(2, rows, 64), torch.randn(8 + rows, 16)
    return hidden_BLD, memory_BMD, positions_CX, visibility


def between_attentions(layer: TransformerLayer, rows: int = 8) -> None:
    """Run what a layer computes before and after attention, and if it has gradients, backward."""
    hidden_BLD, memory_BMD, positions_CX, visibility = inputs_of(rows)
    inputs = (layer.attention_norm(hidden_BLD), layer.attention_norm(memory_BMD), positions_CX)
    read = compiled_if(layer.compiles, RelativeAttention.inputs)
    query_BLNH, parts, _ = read(layer.attention, *inputs, None, None, visibility=visibility)
    completed = compiled_if(layer.compiles, ResidualLayer._completed)
    output_BLD = completed(layer, hidden_BLD, query_BLNH.flatten(2), None)
    if torch.is_grad_enabled():
        torch.cat([each.flatten() for each in (output_BLD, *parts)]).sum().backward()


def num_operations(layer: TransformerLayer) -> int:
    between_attentions(layer)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        between_attentions(layer)
    leaves = [event.name for event in profiler.events() if not event.cpu_children]
    return sum(
        name not in IDLE for name in leaves if name.startswith("aten::") or "cpp_fused" in name
    )


@pytest.mark.slow
def test_compiling_halves_the_operations_and_all_layers_share_the_code() -> None:
    layers = [layer_of(MODERN, layer, "auto") for layer in range(2)]
    first, second = (layer for layer in layers if isinstance(layer, TransformerLayer))
    eager = num_operations(first)
    first.compiles = second.compiles = True
    with inductor.patch({"cpp.enable_kernel_profile": True}):
        compiled = num_operations(first)
    print(f"{eager} operations, compiled {compiled}")
    assert compiled <= eager / 2
    known = counters["stats"]["unique_graphs"]
    between_attentions(second)
    assert counters["stats"]["unique_graphs"] == known
    with torch.no_grad():  # an evaluation, whose memory may have any length
        between_attentions(second, rows=5)
    assert counters["stats"]["unique_graphs"] == known
    assert not counters["graph_break"]


def test_a_model_with_dropout_cannot_be_compiled() -> None:
    with pytest.raises(ConfigError, match=r"model\.dropout"):
        RunConfig(engine=EngineConfig(compile=True), model=ModelConfig(dropout=0.1))
