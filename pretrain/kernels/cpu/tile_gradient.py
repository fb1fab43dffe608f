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
        query_BLHD, position_KHX, content_bias_HD, position_bias_HD, *parts = inputs
        self._scratch = scratch
        self._scale = query_BLHD.shape[3] ** -0.5
        self._query_BLHD = torch.empty_like(query_BLHD, memory_format=torch.contiguous_format)
        # Kept as [H, X, K]: a product with the wide matrix on the right is the faster one.
        self._position_HXK: Tensor | None = None
        if position_KHX is not None and (wants_positions or position_bias_HD is not None):
            self._position_HXK = position_KHX.new_zeros(position_KHX.permute(1, 2, 0).shape)
        self._content_bias_HD, self._position_bias_HD = (
            None if bias_HD is None else torch.zeros_like(bias_HD)
            for bias_HD in (content_bias_HD, position_bias_HD)
        )
        self._sums: dict[str, Tensor] = {}  # of the group at hand
        self._parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts
        ]

    def of_inputs(self) -> tuple[Tensor | None, ...]:
        """The finished gradients in the order of the inputs."""
        positions_KHX = None if self._position_HXK is None else self._position_HXK.permute(2, 0, 1)
        biases = (self._content_bias_HD, self._position_bias_HD)
        scaled = (None if bias_HD is None else bias_HD.mul_(self._scale) for bias_HD in biases)
        return (self._query_BLHD, positions_KHX, *scaled, *self._parts)

    def add_tile(
        self,
        operands: Operands,
        group: Group,
        block: Block,
        weights_PRC: Tensor,
        keep: Tensor | None,
        output_PLD: Tensor,
    ) -> None:
        """Add what a block contributes; blocks come from the last rows to the first.

        `output_PLD` is the gradient of what the group's queries read, divided by the probability of being kept.
        """
        take = self._scratch.take
        output_PRD = output_PLD[:, block.rows]
        work_PRC = take("scores", *weights_PRC.shape)
        kept_PRC = weights_PRC if keep is None else dropped(weights_PRC, keep, out=work_PRC)
        self._add_to_keys("value gradient", operands.value_PKD.shape, block, kept_PRC, output_PRD)
        torch.bmm(output_PRD, operands.value_PKD[:, block.keys].transpose(1, 2), out=work_PRC)
        if keep is not None:
            dropped(work_PRC, keep, out=work_PRC)
        scores_PRC = take("score gradient", *weights_PRC.shape)
        torch.ops.aten._softmax_backward_data.out(
            work_PRC, weights_PRC, -1, weights_PRC.dtype, grad_input=scores_PRC
        )
        content_query_PRD = operands.content_query_PLD[:, block.rows]
        self._add_to_keys(
            "key gradient", operands.key_PKD.shape, block, scores_PRC, content_query_PRD
        )
        content_PRD = torch.bmm(
            scores_PRC, operands.key_PKD[:, block.keys], out=take("read", *output_PRD.shape)
        )
        self._add_to_bias(group, self._content_bias_HD, content_PRD)
        read_PRD = self._position_read(operands, group, block, scores_PRC, work_PRC)
        if read_PRD is not None:
            self._add_to_bias(group, self._position_bias_HD, read_PRD)
            content_PRD.add_(read_PRD)
        target = self._query_BLHD.permute(2, 0, 1, 3)[group.heads, group.lanes, block.rows]
        torch.mul(content_PRD.view(target.shape), self._scale, out=target)

    def _position_read(
        self, operands: Operands, group: Group, block: Block, scores_PRC: Tensor, work_PRC: Tensor
    ) -> Tensor | None:
        """Add to the gradient of the positions; returns what comes back to the queries through them, if it does."""
        positions = operands.positions(block)
        if positions is None or self._position_HXK is None:
            return None
        position_query_hYX, position_hCX = positions
        unshift_(work_PRC, scores_PRC)
        distances_hYC = work_PRC.view(len(position_hCX), -1, block.num_keys)
        self._position_HXK[group.heads, :, -block.num_keys :].baddbmm_(
            position_query_hYX.transpose(1, 2), distances_hYC
        )
        return (
            None
            if self._position_bias_HD is None
            else self._position_product(work_PRC, position_hCX)
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
        self, name: str, shape: torch.Size, block: Block, left_PRC: Tensor, right_PRD: Tensor
    ) -> None:
        left_PCR = left_PRC.transpose(1, 2)
        if block.keys.stop == shape[1]:  # the first block that is met
            self._sums[name] = total_PKD = self._scratch.take(name, *shape)
            if block.keys.start == 0:
                torch.bmm(left_PCR, right_PRD, out=total_PKD)
                return
            total_PKD.zero_()
        # Accumulating within the product is slower: into rows that are not dense, it is done pair by pair.
        product_PCD = self._scratch.take("key product", *left_PCR.shape[:2], shape[2])
        self._sums[name][:, block.keys].add_(torch.bmm(left_PCR, right_PRD, out=product_PCD))

    def _position_product(self, distances_PRC: Tensor, position_hCD: Tensor) -> Tensor:
        P, R, C = distances_PRC.shape
        heads, _, D = position_hCD.shape
        result_PRD = self._scratch.take("position read", P, R, D)
        if heads == 1:  # many small products are a third faster than one tall and narrow one
            return torch.bmm(distances_PRC, position_hCD.expand(P, C, D), out=result_PRD)
        torch.bmm(distances_PRC.view(heads, -1, C), position_hCD, out=result_PRD.view(heads, -1, D))
        return result_PRD

    def _add_to_bias(self, group: Group, bias_HD: Tensor | None, query_PRD: Tensor) -> None:
        if bias_HD is not None:
            heads = group.heads.stop - group.heads.start
            bias_HD[group.heads] += query_PRD.view(heads, -1, query_PRD.shape[2]).sum(1)
