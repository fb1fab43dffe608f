"""Relative attention (section 3.3 of the paper) in fused kernels, without an [L, C] tensor.

Letters of shapes as in `pretrain.model`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.kernels.triton.launch import Inputs, Options, launch_backward, launch_forward
from pretrain.kernels.triton.settings import DROPOUT_LEVELS
from pretrain.kernels.triton.tiling import WORKSPACE_BYTES, Tiles, tiles_for

UNLIMITED = 1 << 30  # a window of all keys: one number, since kernels are compiled for some numbers


def fused_relative_attention(
    query_BLNH: Tensor,
    key_BCGH: Tensor,
    value_BCGH: Tensor,
    position_CNH: Tensor | None,
    content_bias_NH: Tensor | None,
    position_bias_NH: Tensor | None,
    *,
    max_distance: int | None = None,
    documents_BC: Tensor | None = None,
    dropout_keys_B: Tensor | None = None,
    dropout: float = 0.0,
    distance_bias_CN: Tensor | None = None,
    sinks_N: Tensor | None = None,
    deterministic: bool = True,
    tiles: Tiles | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Return the softmax of the scores, times the values: [B, L, N, H].

    The scores are [(q_i + u) . k_j + (q_i + v) . r_ij] / sqrt(H) + biases. The queries are the last
    L of the C keys. `position_CNH` are the projected encodings W_R R, row j for distance C - 1 - j;
    `distance_bias_CN` has the same order. Without positions, u and v are None as well. `sinks_N`
    are scores that join the softmax of every row and have no value.

    Hidden are keys after the query, keys at `max_distance` or more (`same_length`) and keys of
    other documents, whose ids `documents_BC` never fall along C. `dropout` drops weights by a pure
    function of (the lane's `dropout_keys_B`, head, query, key). Unless `deterministic`,
    which runs one more kernel, the gradient of the positions is summed by atomic additions, in no
    fixed order. The backward pass takes as many heads at a time as have their score gradients fit
    into `workspace_bytes`, and at least one group of heads of one lane.

    Query, key, value and position have one dtype. Call `unsupported_reason` first.
    """
    relative = (position_CNH, content_bias_NH, position_bias_NH)
    inputs = Inputs(query_BLNH, key_BCGH, value_BCGH, *relative, distance_bias_CN, sinks_N)
    _check(inputs)
    assert dropout == 0.0 or dropout_keys_B is not None, "dropout needs a key per lane"
    L = query_BLNH.shape[1]
    first_keys_BL, query_ends_BC = _document_bounds(documents_BC, L)
    if tiles is None:
        device, capability = query_BLNH.device, (9, 0)  # for the interpreter any with tiles
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
        tiles = tiles_for(query_BLNH.shape[-1], capability)
    options = Options(
        window=UNLIMITED if max_distance is None else min(max_distance, UNLIMITED),
        first_keys_BL=first_keys_BL,
        query_ends_BC=query_ends_BC,
        dropout_keys_B=dropout_keys_B if dropout else None,
        drop_threshold=min(round(dropout * DROPOUT_LEVELS), DROPOUT_LEVELS - 1),
        deterministic=deterministic,
        tiles=tiles,
        workspace_bytes=workspace_bytes,
    )
    return _FusedAttention.apply(options, *inputs)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, *arguments: Tensor | None) -> Tensor:
        inputs = _laid_out(Inputs(*arguments))  # type: ignore[arg-type]
        output_BLNH, log_sums_BNL = launch_forward(inputs, options)
        ctx.save_for_backward(*inputs, output_BLNH, log_sums_BNL)
        ctx.options = options
        return output_BLNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output_BLNH, log_sums_BNL = ctx.saved_tensors
        needs = Inputs(*ctx.needs_input_grad[1:])
        gradients = launch_backward(
            Inputs(*inputs),
            ctx.options,
            output_BLNH,
            log_sums_BNL,
            output_gradients[0].contiguous(),
            needs_position=bool(needs.position_CNH),
            needs_distance_bias=bool(needs.distance_bias_CN),
        )
        return (None, *gradients)


def _check(inputs: Inputs) -> None:
    """Assert that shapes and types are consistent; they are the caller's, never the user's."""
    query, key, value, position, u, v, distance_bias, sinks = inputs
    B, L, N, H = query.shape
    C, G = key.shape[1:3]
    assert key.shape == value.shape == (B, C, G, H), (query.shape, key.shape, value.shape)
    assert C >= L, (query.shape, key.shape)
    assert N % G == 0, (query.shape, key.shape)
    assert (position is None) == (u is None) == (v is None), "positions, u and v come together"
    for tensor, shape in (
        (position, (C, N, H)),
        (u, (N, H)),
        (v, (N, H)),
        (distance_bias, (C, N)),
        (sinks, (N,)),
    ):
        assert tensor is None or tensor.shape == shape, (tuple(tensor.shape), shape)
    assert key.dtype == value.dtype == query.dtype, (query.dtype, key.dtype, value.dtype)
    assert position is None or position.dtype == query.dtype, (query.dtype, position.dtype)


def _document_bounds(
    documents_BC: Tensor | None, num_queries: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return each query's first key [B, L], and the end of the queries that see each key [B, C]."""
    if documents_BC is None:
        return None, None
    documents_BC = documents_BC.contiguous()
    of_queries_BL = documents_BC[:, -num_queries:].contiguous()
    first_keys_BL = torch.searchsorted(documents_BC, of_queries_BL, out_int32=True)
    ends_BC = torch.searchsorted(of_queries_BL, documents_BC, right=True, out_int32=True)
    return first_keys_BL, ends_BC


def _laid_out(inputs: Inputs) -> Inputs:
    """Make heads contiguous, as the kernels' loads require, and positions as a whole."""
    key, value, position = inputs.key_BCGH, inputs.value_BCGH, inputs.position_CNH
    return inputs._replace(
        key_BCGH=key if key.stride(-1) == 1 else key.contiguous(),
        value_BCGH=value if value.stride(-1) == 1 else value.contiguous(),
        position_CNH=None if position is None else position.contiguous(),
    )
