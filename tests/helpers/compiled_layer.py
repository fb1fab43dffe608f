"""How many operations a layer runs around attention, and what `engine.compile` leaves of them."""

import functools
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pretrain.config.model import POSITIONS
from pretrain.config.run import ModelConfig
from pretrain.mixers.attention.module import RelativeAttention
from pretrain.model.compiled import compiled_if
from pretrain.model.layer import ResidualLayer, RowsLayer, StateLayer, new_layer
from pretrain.model.visibility import Visibility

LANES, LENGTH = 2, 8
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


def layers_of(model: ModelConfig) -> list[RowsLayer]:
    layers = [new_layer(model, layer, "auto") for layer in range(2)]
    return [layer for layer in layers if isinstance(layer, RowsLayer)]


def between_attentions(model: ModelConfig, layer: RowsLayer, rows: int = LENGTH) -> None:
    """Run what a layer computes before and after attention, and if it has gradients, backward."""
    width, is_relative = model.d_model, POSITIONS[model.positions].projects_encodings
    sizes = {"num_queries": LENGTH, "num_keys": rows + LENGTH}
    visibility = Visibility(**sizes, dtype=torch.float32, device=torch.device("cpu"))
    hidden_BLD = torch.randn(LANES, LENGTH, width, requires_grad=True)
    memory_BMD = torch.randn(LANES, rows, width)
    positions_CX = torch.randn(rows + LENGTH, width if is_relative else model.head_width)
    biases: list[Any] = [None, None]
    if is_relative:
        shape = (model.num_heads, model.head_width)
        biases = [torch.zeros(shape, requires_grad=True) for _ in range(2)]
    read = compiled_if(layer.compiles, RelativeAttention.inputs)
    query_BLNH, parts, terms = read(
        *(layer.mixer, hidden_BLD, memory_BMD, positions_CX, *biases),
        norm=layer.input_norm,
        visibility=visibility,
    )
    completed = compiled_if(layer.compiles, ResidualLayer._completed)
    output_BLD = completed(layer, hidden_BLD, query_BLNH.flatten(2), None)
    if torch.is_grad_enabled():
        ends = [output_BLD, *parts, *(each for each in vars(terms).values() if each is not None)]
        torch.cat([each.flatten() for each in ends]).sum().backward()


def whole_layer(model: ModelConfig, layer: StateLayer) -> None:
    """Run a layer with states forward and backward."""
    hidden_BLD = torch.randn(LANES, LENGTH, model.d_model, requires_grad=True)
    carried = [torch.zeros(LANES, *part.shape) for part in model.mixer(0).states(model)]
    layer(hidden_BLD, *carried, None, dropout=None)[0].sum().backward()


def num_operations(model: ModelConfig) -> dict[str, int]:
    """Return how many operations a layer has, but for attention itself, eager and compiled."""
    from torch._inductor import config as inductor  # late: it takes as long as torch itself

    layer = new_layer(model, 0, "auto")
    if isinstance(layer, RowsLayer):
        work = functools.partial(between_attentions, model, layer)
    else:
        work = functools.partial(whole_layer, model, layer)
    result = {}
    for name, compiles in (("eager", False), ("compiled", True)):
        layer.compiles = layer.mixer.compiles = compiles
        with inductor.patch({"cpp.enable_kernel_profile": True}):
            work()
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                work()
        leaves = [event.name for event in profiler.events() or () if not event.cpu_children]
        named = [leaf for leaf in leaves if leaf.startswith("aten::") or "cpp_fused" in leaf]
        result[name] = sum(leaf not in IDLE for leaf in named)
    return result
