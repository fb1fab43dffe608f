"""Attention by distance for the CPU: tiles that stay in cache, no work on keys out of sight, an own backward pass.

B lanes, L queries, M memory rows, C = M + L keys, N heads, G groups of heads that share a key and value, H head width.
Score of query i and key j at distance t = i + M - j: [(q_i + u) . k_j + (q_i + v) . r_t] / sqrt(H) + b_t. The paper's
positions have u, v and r; a bias per distance has b; rotated queries and keys need none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.kernels.cpu.tile_gradient import Gradients
from pretrain.kernels.cpu.tile_math import Operands, Scratch, attend
from pretrain.kernels.cpu.tiles import Block, Group, Tiling, first_keys, groups

DEFAULT_TILING = Tiling()


def relative_attention(
    query_BLNH: Tensor,
    key_value_parts: Sequence[Tensor],
    position_CNH: Tensor | None,
    content_bias_NH: Tensor | None,
    position_bias_NH: Tensor | None,
    *,
    distance_bias_CN: Tensor | None = None,
    max_distance: int | None = None,
    documents_BC: Tensor | None = None,
    keep_NBLC: Tensor | None = None,
    keep_probability: float = 1.0,
    tiling: Tiling = DEFAULT_TILING,
) -> Tensor:
    """What each query reads, [B, L, N, H]; gradients flow to the first six arguments.

    `key_value_parts` are [B, rows, 2, G, H], keys and values as projected: memory's rows, then the segment's. Put
    together they are the C keys, of which the queries are the last L. Consecutive heads share a group. `position_CNH`
    are the projected encodings W_R R, row j for distance C - 1 - j. `distance_bias_CN` lies in the same order; it takes
    their place.

    Hidden are keys after the query, keys at `max_distance` or more (`same_length`) and keys of other documents, whose
    ids `documents_BC` never fall along C. Where `keep_NBLC` is False a weight is dropped; the others are divided by
    `keep_probability`.
    """
    B, L, N, _ = query_BLNH.shape
    C, G = sum(part.shape[1] for part in key_value_parts), key_value_parts[0].shape[3]
    position_CNX = position_CNH if distance_bias_CN is None else distance_bias_CN[:, :, None]
    assert position_CNH is None or distance_bias_CN is None
    assert position_CNX is None or len(position_CNX) == C, (tuple(position_CNX.shape), C)
    assert (position_CNH is None) == (position_bias_NH is None)
    assert N % G == 0, (N, G)
    first = first_keys(L, C, max_distance, documents_BC)
    plan = groups(N, G, B, L, C, first, tiling, query_BLNH.dtype)
    inputs = (query_BLNH, position_CNX, content_bias_NH, position_bias_NH, *key_value_parts)
    return _RelativeAttention.apply(
        plan, 1.0 / keep_probability, torch.is_grad_enabled(), keep_NBLC, *inputs
    )


class _RelativeAttention(torch.autograd.Function):
    """Saves the inputs and the softmax of every tile; what else the gradient needs is computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: list[Group],
        keep_scale: float,
        saves: bool,
        keep_NBLC: Tensor | None,
        *inputs: Any,
    ) -> Tensor:
        scratch = Scratch(inputs[0])
        output_BLNH = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        output_NBLH = output_BLNH.permute(2, 0, 1, 3)
        saved = []
        for group in plan:
            operands = Operands.read(group, inputs, scratch)
            for block in group.blocks:
                keep = _keep_of(keep_NBLC, group, block)
                weights_PRS, read_PRH = attend(operands, block, keep, scratch, reuse=not saves)
                target = output_NBLH[group.heads, group.lanes, block.rows]
                torch.mul(read_PRH.view(target.shape), keep_scale, out=target)
                if saves:
                    saved.append(weights_PRS)
        ctx.save_for_backward(keep_NBLC, *inputs, *saved)
        ctx.plan, ctx.keep_scale, ctx.num_inputs = plan, keep_scale, len(inputs)
        return output_BLNH

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the name of ctx)
        ctx: Any, *output_gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        keep_NBLC, *saved = ctx.saved_tensors
        inputs, weights = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        output_NBLH = output_gradients[0].permute(2, 0, 1, 3)
        scratch = Scratch(inputs[0])
        gradients = Gradients(inputs, scratch, wants_positions=ctx.needs_input_grad[5])
        for group in ctx.plan:
            operands = Operands.read(group, inputs, scratch)
            output = output_NBLH[group.heads, group.lanes]
            output = torch.mul(
                output, ctx.keep_scale, out=scratch.take("output gradient", *output.shape)
            ).flatten(0, 1)
            blocks = list(zip(group.blocks, weights, strict=False))
            weights = weights[len(blocks) :]
            # From the last rows, which see the most keys: their products can start the sums instead of adding to zeros.
            for block, weights_PRS in reversed(blocks):
                gradients.add_tile(
                    operands, group, block, weights_PRS, _keep_of(keep_NBLC, group, block), output
                )
            gradients.store_keys(group)
        return (None, None, None, None, *gradients.of_inputs())


def _keep_of(keep_NBLC: Tensor | None, group: Group, block: Block) -> Tensor | None:
    return (
        None if keep_NBLC is None else keep_NBLC[group.heads, group.lanes, block.rows, block.keys]
    )
