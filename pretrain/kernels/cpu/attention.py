"""Attention by distance on the CPU: tiles that stay in cache, with their own backward pass.

The score of query i and key j at distance t = i + M - j is

    [(q_i + u) . k_j + (q_i + v) . r_t] / sqrt(H) + b_t

The paper's positions have u, v and r; a bias per distance has b; rotated queries and keys need
neither. A sink is one more score of each head's softmax, whose value is zero. Letters of shapes as
in `pretrain.model` and `tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.kernels.cpu.relative_shift import unshift_
from pretrain.kernels.cpu.tiles import (
    Block,
    Group,
    Operands,
    Scratch,
    Tiling,
    attend,
    dropped,
    first_keys,
    group_parts,
    groups,
    row_ranges,
)

DEFAULT_TILING = Tiling()


def relative_attention(
    query_BLNH: Tensor,
    key_value_parts: Sequence[Tensor],
    position_CNH: Tensor | None,
    content_bias_NH: Tensor | None,
    position_bias_NH: Tensor | None,
    *,
    distance_bias_CN: Tensor | None = None,
    sinks_N: Tensor | None = None,
    max_distance: int | None = None,
    documents_BC: Tensor | None = None,
    keep_NBLC: Tensor | None = None,
    keep_probability: float = 1.0,
    tiling: Tiling = DEFAULT_TILING,
) -> Tensor:
    """Return what each query reads, [B, L, N, H]; gradients flow to the tensors up to `sinks_N`.

    `key_value_parts` are [B, rows, 2, G, H], keys and values as projected: memory's rows, then the
    segment's. Together they are the C keys, of which the queries are the last L. Consecutive heads
    share a key head. `position_CNH` are the projected encodings W_R R, row j for distance C - 1 -
    j; `distance_bias_CN` has the same order and replaces them.

    Hidden are keys after the query, keys at `max_distance` or more (`same_length`) and keys of
    other documents, whose ids `documents_BC` never fall along C. Where `keep_NBLC` is False a
    weight is dropped; the others are divided by `keep_probability`.
    """
    L, N = query_BLNH.shape[1:3]
    C, G = sum(part.shape[1] for part in key_value_parts), key_value_parts[0].shape[3]
    position_CNX = position_CNH if distance_bias_CN is None else distance_bias_CN[:, :, None]
    assert position_CNH is None or distance_bias_CN is None
    assert position_CNX is None or len(position_CNX) == C, (tuple(position_CNX.shape), C)
    assert (position_CNH is None) == (position_bias_NH is None)
    assert N % G == 0, (N, G)
    plan = groups(query_BLNH, G, C, first_keys(L, C, max_distance, documents_BC), tiling)
    biases = (content_bias_NH, position_bias_NH, sinks_N)
    inputs = (query_BLNH, position_CNX, *biases, *key_value_parts)
    return _RelativeAttention.apply(
        plan, 1.0 / keep_probability, torch.is_grad_enabled(), keep_NBLC, *inputs
    )


class _RelativeAttention(torch.autograd.Function):
    """Keeps the inputs and the softmax of every tile for the backward pass.

    Whatever else the gradient needs (gathered operands, dropped weights) is computed again, tile by
    tile, because that is cheaper than reading it back from host memory.
    """

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
            out = scratch.take("output gradient", *output.shape)
            output_PLH = torch.mul(output, ctx.keep_scale, out=out).flatten(0, 1)
            blocks = list(zip(group.blocks, weights, strict=False))
            weights = weights[len(blocks) :]
            # From the last rows, which see the most keys: their products initialize the sums.
            for block, weights_PRS in reversed(blocks):
                keep = _keep_of(keep_NBLC, group, block)
                gradients.add_tile(operands, group, block, weights_PRS, keep, output_PLH)
            gradients.store_keys(group)
        return (None, None, None, None, *gradients.of_inputs())


def _keep_of(keep_NBLC: Tensor | None, group: Group, block: Block) -> Tensor | None:
    if keep_NBLC is None:
        return None
    return keep_NBLC[group.heads, group.lanes, block.rows, block.keys]


class Gradients:
    """The gradients of the inputs, summed over tiles in an order that depends on the plan alone."""

    def __init__(self, inputs: Sequence[Any], scratch: Scratch, *, wants_positions: bool) -> None:
        query_BLNH, position_CNX, content_bias_NH, position_bias_NH, sinks_N, *parts = inputs
        self._scratch = scratch
        self._scale = query_BLNH.shape[3] ** -0.5
        self._query_BLNH = torch.empty_like(query_BLNH, memory_format=torch.contiguous_format)
        # As [N, X, C]: a product is faster with the wide matrix on the right.
        self._position_NXC: Tensor | None = None
        if position_CNX is not None and (wants_positions or position_bias_NH is not None):
            self._position_NXC = position_CNX.new_zeros(position_CNX.permute(1, 2, 0).shape)
        self._content_bias_NH, self._position_bias_NH = (
            None if bias_NH is None else torch.zeros_like(bias_NH)
            for bias_NH in (content_bias_NH, position_bias_NH)
        )
        self._sinks_N = None if sinks_N is None else torch.zeros_like(sinks_N)
        self._sums: dict[str, Tensor] = {}  # of the current group
        self._parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts
        ]

    def of_inputs(self) -> tuple[Tensor | None, ...]:
        """Return the gradients in the order of the inputs."""
        positions_CNX = None if self._position_NXC is None else self._position_NXC.permute(2, 0, 1)
        biases = (self._content_bias_NH, self._position_bias_NH)
        scaled = (None if bias_NH is None else bias_NH.mul_(self._scale) for bias_NH in biases)
        return (self._query_BLNH, positions_CNX, *scaled, self._sinks_N, *self._parts)

    def add_tile(
        self,
        operands: Operands,
        group: Group,
        block: Block,
        weights_PRS: Tensor,
        keep: Tensor | None,
        output_PLH: Tensor,
    ) -> None:
        """Add the contribution of a block; blocks come from the last rows to the first.

        `output_PLH` is the gradient of what the group's queries read, divided by the probability
        of keeping a weight.
        """
        take = self._scratch.take
        output_PRH = output_PLH[:, block.rows]
        work_PRS = take("scores", *weights_PRS.shape)
        kept_PRS = weights_PRS if keep is None else dropped(weights_PRS, keep, out=work_PRS)
        self._add_to_keys("value gradient", operands.value_PCH.shape, block, kept_PRS, output_PRH)
        torch.bmm(output_PRH, operands.value_PCH[:, block.keys].transpose(1, 2), out=work_PRS)
        if keep is not None:
            dropped(work_PRS, keep, out=work_PRS)
        scores_PRS = take("score gradient", *weights_PRS.shape)
        torch.ops.aten._softmax_backward_data.out(
            work_PRS, weights_PRS, -1, weights_PRS.dtype, grad_input=scores_PRS
        )
        if self._sinks_N is not None:
            # One number added to all scores of a row, the sink among them, changes nothing, so
            # their gradients sum to zero.
            self._sinks_N[group.heads] -= scores_PRS.view(operands.num_heads, -1).sum(1)
        content_query_PRH = operands.content_query_PLH[:, block.rows]
        self._add_to_keys(
            "key gradient", operands.key_PCH.shape, block, scores_PRS, content_query_PRH
        )
        content_PRH = torch.bmm(
            scores_PRS, operands.key_PCH[:, block.keys], out=take("read", *output_PRH.shape)
        )
        self._add_to_bias(group, self._content_bias_NH, content_PRH)
        read_PRH = self._position_read(operands, group, block, scores_PRS, work_PRS)
        if read_PRH is not None:
            self._add_to_bias(group, self._position_bias_NH, read_PRH)
            content_PRH.add_(read_PRH)
        target = self._query_BLNH.permute(2, 0, 1, 3)[group.heads, group.lanes, block.rows]
        torch.mul(content_PRH.view(target.shape), self._scale, out=target)

    def _position_read(
        self, operands: Operands, group: Group, block: Block, scores_PRS: Tensor, work_PRS: Tensor
    ) -> Tensor | None:
        """Add to the positions' gradient; return their part of the queries' gradient, if any."""
        positions = operands.positions(block)
        if positions is None or self._position_NXC is None:
            return None
        query_nYX, position_nSX = positions
        unshift_(work_PRS, scores_PRS)
        distances_nYS = work_PRS.view(len(position_nSX), -1, block.num_keys)
        gradient_nXS = self._position_NXC[group.heads, :, -block.num_keys :]
        gradient_nXS.baddbmm_(query_nYX.transpose(1, 2), distances_nYS)
        if self._position_bias_NH is None:
            return None
        return self._position_product(work_PRS, position_nSX)

    def store_keys(self, group: Group) -> None:
        """Add the sums over the group's keys and values to the gradients of the parts."""
        views = group_parts(group, self._parts)
        for gradient, rows in zip(views, row_ranges(self._parts), strict=True):
            for target, name in zip(gradient, ("key gradient", "value gradient"), strict=True):
                total = self._sums[name].view(*target.shape[:2], -1, target.shape[3])[:, :, rows]
                if group.starts_key_heads:
                    target.copy_(total)
                else:
                    target.add_(total)

    def _add_to_keys(
        self, name: str, shape: torch.Size, block: Block, left_PRS: Tensor, right_PRH: Tensor
    ) -> None:
        left_PSR = left_PRS.transpose(1, 2)
        if block.keys.stop == shape[1]:  # the first block, the one of the last rows
            self._sums[name] = total_PCH = self._scratch.take(name, *shape)
            if block.keys.start == 0:
                torch.bmm(left_PSR, right_PRH, out=total_PCH)
                return
            total_PCH.zero_()
        # `baddbmm_` is slower here: into rows that are not dense it works pair by pair.
        product_PSH = self._scratch.take("key product", *left_PSR.shape[:2], shape[2])
        self._sums[name][:, block.keys].add_(torch.bmm(left_PSR, right_PRH, out=product_PSH))

    def _position_product(self, distances_PRS: Tensor, position_nSH: Tensor) -> Tensor:
        P, R, S = distances_PRS.shape
        heads, _, H = position_nSH.shape
        result_PRH = self._scratch.take("position read", P, R, H)
        if heads == 1:  # many small products are a third faster than one tall and narrow product
            return torch.bmm(distances_PRS, position_nSH.expand(P, S, H), out=result_PRH)
        torch.bmm(distances_PRS.view(heads, -1, S), position_nSH, out=result_PRH.view(heads, -1, H))
        return result_PRH

    def _add_to_bias(self, group: Group, bias_NH: Tensor | None, query_PRH: Tensor) -> None:
        if bias_NH is not None:
            heads = group.heads.stop - group.heads.start
            bias_NH[group.heads] += query_PRH.view(heads, -1, query_PRH.shape[2]).sum(1)
