"""One tile of relative attention and its gradient, in matrix products and passes over scores that are still in cache.

L queries, K keys in all, D head width. A tile has P pairs of a head and a lane (head first), R rows and C columns, the
keys it reads; h are its heads. Position terms have width X: D for encodings, 1 for a bias per distance, which is an
encoding that every query multiplies by one.

The position scores of a tile are computed for the distances from its last row, so row i lies R - 1 - i places too far
right. Read in steps of C - 1 instead of C elements, the same memory is the shifted tile: no copy, no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from pretrain.kernels.cpu.tiles import Block, Group


class Scratch:
    """Memory for results that one tile makes and uses: the next tile finds it still in cache."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor; it overwrites what was last taken under `name`."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class Operands:
    """What the tiles of a group multiply. The queries carry their bias and the scale."""

    num_heads: int
    content_query_PLD: Tensor
    key_PKD: Tensor
    value_PKD: Tensor
    position_query_hBLX: Tensor | None
    position_hKX: Tensor | None

    @classmethod
    def read(cls, group: Group, inputs: Sequence[Any], scratch: Scratch) -> Operands:
        """The group's share of the inputs, gathered heads first."""
        query_BLHD, position_KHX, content_bias_HD, position_bias_HD, *parts = inputs
        query = query_BLHD.permute(2, 0, 1, 3)[group.heads, group.lanes]
        heads, lanes, _, width = query.shape
        views = group_parts(group, parts)
        if (
            len(views) == 1 and views[0].stride(-2) == width
        ):  # a cache, which lies heads first already
            key_value = views[0]
        else:
            key_value = scratch.take(
                "key and value", 2, heads, lanes, sum(part.shape[1] for part in parts), width
            )
            for part, rows in zip(views, row_ranges(parts), strict=True):
                key_value[:, :, :, rows] = part
        key_PKD, value_PKD = key_value.flatten(1, 2)
        content = _scaled(
            query, content_bias_HD, group, scratch.take("content query", *query.shape)
        )
        operands = (heads, content.flatten(0, 1), key_PKD, value_PKD)
        if position_KHX is None:
            return cls(*operands, None, None)
        if position_bias_HD is None:
            position_query = query.new_ones(()).expand(*query.shape[:3], 1)
        else:
            position_query = _scaled(
                query, position_bias_HD, group, scratch.take("position query", *query.shape)
            )
        position_hKX = position_KHX.transpose(0, 1)[group.heads]
        if position_hKX.stride(1) != position_hKX.shape[2]:
            position_hKX = scratch.take("position", *position_hKX.shape).copy_(position_hKX)
        return cls(*operands, position_query, position_hKX)

    def positions(self, block: Block) -> tuple[Tensor, Tensor] | None:
        """The block's queries for positions [h, B * R, X] and its positions [h, C, X], if scores have such a term."""
        if self.position_query_hBLX is None or self.position_hKX is None:
            return None
        # Distances count from the block's last row: its keys end where the positions end.
        return self.position_query_hBLX[:, :, block.rows].flatten(1, 2), self.position_hKX[
            :, -block.num_keys :
        ]


def _scaled(query: Tensor, bias_HD: Tensor | None, group: Group, out: Tensor) -> Tensor:
    scale = query.shape[3] ** -0.5
    if bias_HD is None:
        return torch.mul(query, scale, out=out)
    return torch.add(bias_HD[group.heads, None, None] * scale, query, alpha=scale, out=out)


def group_parts(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """Views [2, h, B, rows, D] of [B, rows, 2, G, D]: keys and values of the group's heads and lanes."""
    return [part[group.lanes, :, :, group.key_heads].permute(2, 3, 0, 1, 4) for part in parts]


def row_ranges(parts: Sequence[Tensor]) -> list[slice]:
    """Where each part's rows lie once the parts are put together."""
    stops = [sum(part.shape[1] for part in parts[: index + 1]) for index in range(len(parts))]
    return [slice(stop - part.shape[1], stop) for part, stop in zip(parts, stops, strict=True)]


def shifted(tile_PRC: Tensor) -> Tensor:
    """Row i of a contiguous tile moved left by R - 1 - i, as a view. Keys after the query are leftovers: mask them."""
    P, R, C = tile_PRC.shape
    return tile_PRC.as_strided((P, R, C), (R * C, C - 1, 1), tile_PRC.storage_offset() + R - 1)


def unshift_(tile_PRC: Tensor, shifted_PRC: Tensor) -> None:
    """Fill `tile_PRC` with what `shifted` turns into `shifted_PRC`, whose entries after the query are zero."""
    P, R, C = shifted_PRC.shape
    flat = tile_PRC.view(P, R * C)
    flat[:, : R - 1] = 0
    # The last column only holds the last row's own key; rows of C in steps of C - 1 would overlap, and threads
    # would race for the shared element.
    flat[:, R - 1 : -1].view(P, R, C - 1).copy_(shifted_PRC[:, :, :-1])
    flat[:, -1] = shifted_PRC[:, -1, -1]


def attend(
    operands: Operands, block: Block, keep: Tensor | None, scratch: Scratch, *, reuse: bool
) -> tuple[Tensor, Tensor]:
    """The softmax [P, R, C] before dropout and what the rows read [P, R, D]; with `reuse` both are scratch."""
    content_query_PRD = operands.content_query_PLD[:, block.rows]
    P, R, D = content_query_PRD.shape
    shape = (P, R, block.num_keys)
    scores = scratch.take("scores", *shape)
    positions = operands.positions(block)
    if positions is not None:
        position_query_hYX, position_hCX = positions
        torch.bmm(
            position_query_hYX,
            position_hCX.transpose(1, 2),
            out=scores.view(len(position_hCX), -1, shape[2]),
        )
    weights_PRC = scratch.take("weights", *shape) if reuse else scores.new_empty(shape)
    torch.bmm(content_query_PRD, operands.key_PKD[:, block.keys].transpose(1, 2), out=weights_PRC)
    if positions is not None:
        weights_PRC.add_(shifted(scores))
    weights_PRC.view(operands.num_heads, -1, R, block.num_keys)[..., -block.mask.shape[-1] :].add_(
        block.mask
    )
    torch.softmax(weights_PRC, dim=-1, out=weights_PRC)
    kept_PRC = weights_PRC if keep is None else dropped(weights_PRC, keep, out=scores)
    read_PRD = torch.bmm(
        kept_PRC, operands.value_PKD[:, block.keys], out=scratch.take("read", P, R, D)
    )
    return weights_PRC, read_PRD


def dropped(tile_PRC: Tensor, keep: Tensor, *, out: Tensor) -> Tensor:
    """The tile with zeros where `keep` [h, B, R, C] is False."""
    # A product with bytes is twice as fast as `where` or a product with booleans.
    torch.mul(tile_PRC.view(keep.shape), keep.view(torch.uint8), out=out.view(keep.shape))
    return out
