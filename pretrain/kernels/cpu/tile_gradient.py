"""The gradient of relative attention, tile by tile; names and shapes as in `cpu_tile_math`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.kernels.cpu.tile_math import (
    Operands,
    Scratch,
    dropped,
    group_parts,
    row_ranges,
    unshift_,
)
from pretrain.kernels.cpu.tiles import Block, Group


class Gradients:
    """Sums over tiles, in an order that depends on the plan alone."""

    def __init__(self, inputs: Sequence[Any], scratch: Scratch, *, wants_positions: bool) -> None:
        query_BLNH, position_CNX, content_bias_NH, position_bias_NH, *parts = inputs
        self._scratch = scratch
        self._scale = query_BLNH.shape[3] ** -0.5
        self._query_BLNH = torch.empty_like(query_BLNH, memory_format=torch.contiguous_format)
        # Kept as [N, X, C]: a product with the wide matrix on the right is the faster one.
        self._position_NXC: Tensor | None = None
        if position_CNX is not None and (wants_positions or position_bias_NH is not None):
            self._position_NXC = position_CNX.new_zeros(position_CNX.permute(1, 2, 0).shape)
        self._content_bias_NH, self._position_bias_NH = (
            None if bias_NH is None else torch.zeros_like(bias_NH)
            for bias_NH in (content_bias_NH, position_bias_NH)
        )
        self._sums: dict[str, Tensor] = {}  # of the group at hand
        self._parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts
        ]

    def of_inputs(self) -> tuple[Tensor | None, ...]:
        """The finished gradients in the order of the inputs."""
        positions_CNX = None if self._position_NXC is None else self._position_NXC.permute(2, 0, 1)
        biases = (self._content_bias_NH, self._position_bias_NH)
        scaled = (None if bias_NH is None else bias_NH.mul_(self._scale) for bias_NH in biases)
        return (self._query_BLNH, positions_CNX, *scaled, *self._parts)

    def add_tile(
        self,
        operands: Operands,
        group: Group,
        block: Block,
        weights_PRS: Tensor,
        keep: Tensor | None,
        output_PLH: Tensor,
    ) -> None:
        """Add what a block contributes; blocks come from the last rows to the first.

        `output_PLH` is the gradient of what the group's queries read, divided by the probability of being kept.
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
        """Add to the gradient of the positions; returns what comes back to the queries through them, if it does."""
        positions = operands.positions(block)
        if positions is None or self._position_NXC is None:
            return None
        position_query_nYX, position_nSX = positions
        unshift_(work_PRS, scores_PRS)
        distances_nYS = work_PRS.view(len(position_nSX), -1, block.num_keys)
        self._position_NXC[group.heads, :, -block.num_keys :].baddbmm_(
            position_query_nYX.transpose(1, 2), distances_nYS
        )
        return (
            None
            if self._position_bias_NH is None
            else self._position_product(work_PRS, position_nSX)
        )

    def store_keys(self, group: Group) -> None:
        """Hand the sums of the group's keys and values over to the gradients of the parts."""
        for gradient, rows in zip(
            group_parts(group, self._parts), row_ranges(self._parts), strict=True
        ):
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
        if block.keys.stop == shape[1]:  # the first block that is met
            self._sums[name] = total_PCH = self._scratch.take(name, *shape)
            if block.keys.start == 0:
                torch.bmm(left_PSR, right_PRH, out=total_PCH)
                return
            total_PCH.zero_()
        # Accumulating within the product is slower: into rows that are not dense, it is done pair by pair.
        product_PSH = self._scratch.take("key product", *left_PSR.shape[:2], shape[2])
        self._sums[name][:, block.keys].add_(torch.bmm(left_PSR, right_PRH, out=product_PSH))

    def _position_product(self, distances_PRS: Tensor, position_nSH: Tensor) -> Tensor:
        P, R, S = distances_PRS.shape
        heads, _, H = position_nSH.shape
        result_PRH = self._scratch.take("position read", P, R, H)
        if heads == 1:  # many small products are a third faster than one tall and narrow one
            return torch.bmm(distances_PRS, position_nSH.expand(P, S, H), out=result_PRH)
        torch.bmm(distances_PRS.view(heads, -1, S), position_nSH, out=result_PRH.view(heads, -1, H))
        return result_PRH

    def _add_to_bias(self, group: Group, bias_NH: Tensor | None, query_PRH: Tensor) -> None:
        if bias_NH is not None:
            heads = group.heads.stop - group.heads.start
            bias_NH[group.heads] += query_PRH.view(heads, -1, query_PRH.shape[2]).sum(1)
