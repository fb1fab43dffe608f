"""Relative attention (section 3.3 of the paper) in fused kernels that never hold a tensor of queries times keys.

B lanes, L queries, M memory rows, K = M + L keys, H heads, G groups of heads that share a key and value, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.kernels.triton.launch import Inputs, Options, launch_backward, launch_forward
from pretrain.kernels.triton.settings import DROPOUT_LEVELS, Tiles, tiles_for


def fused_relative_attention(
    query_BLHD: Tensor,
    key_BKGD: Tensor,
    value_BKGD: Tensor,
    position_KHD: Tensor | None,
    content_bias_HD: Tensor | None,
    position_bias_HD: Tensor | None,
    *,
    max_distance: int | None = None,
    documents_BK: Tensor | None = None,
    dropout_keys_B: Tensor | None = None,
    dropout: float = 0.0,
    key_bias_BHK: Tensor | None = None,
    distance_bias_KH: Tensor | None = None,
    deterministic: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Softmax of [(q_i + u) . k_j + (q_i + v) . r_ij] / sqrt(D) + biases, times the values: [B, L, H, D].

    The queries are the last L of the K keys. `position_KHD` are the projected encodings W_R R, row j for distance
    K - 1 - j; `distance_bias_KH` lies in the same order. Without positions, u and v are None too.

    Hidden are keys after the query, keys at `max_distance` or more (`same_length`) and keys of other documents, whose
    ids `documents_BK` never fall along K. `dropout` drops weights by a pure function of (the lane's `dropout_keys_B`,
    head, query, key). The gradient of the positions is summed by atomic additions, in no fixed order, unless
    `deterministic`, which costs one kernel more.

    Query, key, value and position share one dtype. Ask `unsupported_reason` of triton_support first.
    """
    inputs = Inputs(
        query_BLHD,
        key_BKGD,
        value_BKGD,
        position_KHD,
        content_bias_HD,
        position_bias_HD,
        key_bias_BHK,
        distance_bias_KH,
    )
    _check(inputs)
    assert dropout == 0.0 or dropout_keys_B is not None, "dropout needs a key per lane"
    K, L = key_BKGD.shape[1], query_BLHD.shape[1]
    first_keys_BL, query_ends_BK = _document_bounds(documents_BK, L)
    if tiles is None:
        tiles = tiles_for(query_BLHD.shape[-1], _capability(query_BLHD.device))
    options = Options(
        window=K if max_distance is None else min(max_distance, K),
        first_keys_BL=first_keys_BL,
        query_ends_BK=query_ends_BK,
        dropout_keys_B=dropout_keys_B if dropout else None,
        drop_threshold=min(round(dropout * DROPOUT_LEVELS), DROPOUT_LEVELS - 1),
        deterministic=deterministic,
        tiles=tiles,
    )
    return _FusedAttention.apply(options, *inputs)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Options, *arguments: Tensor | None) -> Tensor:
        inputs = _laid_out(Inputs(*arguments))  # type: ignore[arg-type]
        output_BLHD, log_sums_BHL = launch_forward(inputs, options)
        ctx.save_for_backward(*inputs, output_BLHD, log_sums_BHL)
        ctx.options = options
        return output_BLHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, output_BLHD, log_sums_BHL = ctx.saved_tensors
        needs = Inputs(*ctx.needs_input_grad[1:])
        gradients = launch_backward(
            Inputs(*inputs),
            ctx.options,
            output_BLHD,
            log_sums_BHL,
            output_gradients[0].contiguous(),
            needs_position=bool(needs.position_KHD),
            needs_distance_bias=bool(needs.distance_bias_KH),
        )
        return (None, *gradients)


def _capability(device: torch.device) -> tuple[int, int]:
    """The GPU's; in the interpreter, which has no limits of its own, any that tiles are chosen for."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _check(inputs: Inputs) -> None:
    """The caller's shapes and types fit together; they never come from the user."""
    query, key, value, position, u, v, key_bias, distance_bias = inputs
    B, L, H, D = query.shape
    K, G = key.shape[1:3]
    assert key.shape == value.shape == (B, K, G, D), (query.shape, key.shape, value.shape)
    assert K >= L, (query.shape, key.shape)
    assert H % G == 0, (query.shape, key.shape)
    assert (position is None) == (u is None) == (v is None), "positions, u and v come together"
    for tensor, shape in (
        (position, (K, H, D)),
        (u, (H, D)),
        (v, (H, D)),
        (key_bias, (B, H, K)),
        (distance_bias, (K, H)),
    ):
        assert tensor is None or tensor.shape == shape, (tuple(tensor.shape), shape)
    assert key.dtype == value.dtype == query.dtype, (query.dtype, key.dtype, value.dtype)
    assert position is None or position.dtype == query.dtype, (query.dtype, position.dtype)


def _document_bounds(
    documents_BK: Tensor | None, num_queries: int
) -> tuple[Tensor | None, Tensor | None]:
    """The first key each query sees [B, L] and one past the last query that sees each key [B, K]."""
    if documents_BK is None:
        return None, None
    documents_BK = documents_BK.contiguous()
    of_queries_BL = documents_BK[:, -num_queries:].contiguous()
    first_keys_BL = torch.searchsorted(documents_BK, of_queries_BL, out_int32=True)
    return first_keys_BL, torch.searchsorted(
        of_queries_BL, documents_BK, right=True, out_int32=True
    )


def _laid_out(inputs: Inputs) -> Inputs:
    """The inputs with heads dense in memory, which the kernels' loads rely on; positions dense altogether."""
    key, value, position = inputs.key_BKGD, inputs.value_BKGD, inputs.position_KHD
    return inputs._replace(
        key_BKGD=key if key.stride(-1) == 1 else key.contiguous(),
        value_BKGD=value if value.stride(-1) == 1 else value.contiguous(),
        position_KHD=None if position is None else position.contiguous(),
    )
