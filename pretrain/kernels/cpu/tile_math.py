"""One tile of relative attention and its gradient, in matrix products and passes over scores that are still in cache.

L queries, C keys in all, H head width. A tile has P pairs of a head and a lane (head first), R rows and S columns, the
keys it reads; n are its heads. Position terms have width X: H for encodings, 1 for a bias per distance, which is an
encoding that every query multiplies by one.

The position scores of a tile are computed for the distances from its last row, so row i lies R - 1 - i places too far
right. Read in steps of S - 1 instead of S elements, the same memory is the shifted tile: no copy, no padding.
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
    content_query_PLH: Tensor
    key_PCH: Tensor
    value_PCH: Tensor
    position_query_nBLX: Tensor | None
    position_nCX: Tensor | None

    @classmethod
    def read(cls, group: Group, inputs: Sequence[Any], scratch: Scratch) -> Operands:
        """The group's share of the inputs, gathered heads first."""
        query_BLNH, position_CNX, content_bias_NH, position_bias_NH, *parts = inputs
        query = query_BLNH.permute(2, 0, 1, 3)[group.heads, group.lanes]
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
        key_PCH, value_PCH = key_value.flatten(1, 2)
        content = _scaled(
            query, content_bias_NH, group, scratch.take("content query", *query.shape)
        )
        operands = (heads, content.flatten(0, 1), key_PCH, value_PCH)
        if position_CNX is None:
            return cls(*operands, None, None)
        if position_bias_NH is None:
            position_query = query.new_ones(()).expand(*query.shape[:3], 1)
        else:
            position_query = _scaled(
                query, position_bias_NH, group, scratch.take("position query", *query.shape)
            )
        position_nCX = position_CNX.transpose(0, 1)[group.heads]
        if position_nCX.stride(1) != position_nCX.shape[2]:
            position_nCX = scratch.take("position", *position_nCX.shape).copy_(position_nCX)
        return cls(*operands, position_query, position_nCX)

    def positions(self, block: Block) -> tuple[Tensor, Tensor] | None:
        """The block's queries for positions [n, B * R, X] and its positions [n, S, X], if scores have such a term."""
        if self.position_query_nBLX is None or self.position_nCX is None:
            return None
        # Distances count from the block's last row: its keys end where the positions end.
        return self.position_query_nBLX[:, :, block.rows].flatten(1, 2), self.position_nCX[
            :, -block.num_keys :
        ]


def _scaled(query: Tensor, bias_NH: Tensor | None, group: Group, out: Tensor) -> Tensor:
    scale = query.shape[3] ** -0.5
    if bias_NH is None:
        return torch.mul(query, scale, out=out)
    return torch.add(bias_NH[group.heads, None, None] * scale, query, alpha=scale, out=out)


def group_parts(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """Views [2, n, B, rows, H] of [B, rows, 2, G, H]: keys and values of the group's heads and lanes."""
    return [part[group.lanes, :, :, group.key_heads].permute(2, 3, 0, 1, 4) for part in parts]


def row_ranges(parts: Sequence[Tensor]) -> list[slice]:
    """Where each part's rows lie once the parts are put together."""
    stops = [sum(part.shape[1] for part in parts[: index + 1]) for index in range(len(parts))]
    return [slice(stop - part.shape[1], stop) for part, stop in zip(parts, stops, strict=True)]


def shifted(tile_PRS: Tensor) -> Tensor:
    """Row i of a contiguous tile moved left by R - 1 - i, as a view. Keys after the query are leftovers: mask them."""
    P, R, S = tile_PRS.shape
    return tile_PRS.as_strided((P, R, S), (R * S, S - 1, 1), tile_PRS.storage_offset() + R - 1)


def unshift_(tile_PRS: Tensor, shifted_PRS: Tensor) -> None:
    """Fill `tile_PRS` with what `shifted` turns into `shifted_PRS`, whose entries after the query are zero."""
    P, R, S = shifted_PRS.shape
    flat = tile_PRS.view(P, R * S)
    flat[:, : R - 1] = 0
    # The last column only holds the last row's own key; rows of S in steps of S - 1 would overlap, and threads
    # would race for the shared element.
    flat[:, R - 1 : -1].view(P, R, S - 1).copy_(shifted_PRS[:, :, :-1])
    flat[:, -1] = shifted_PRS[:, -1, -1]


def attend(
    operands: Operands, block: Block, keep: Tensor | None, scratch: Scratch, *, reuse: bool
) -> tuple[Tensor, Tensor]:
    """The softmax [P, R, S] before dropout and what the rows read [P, R, H]; with `reuse` both are scratch."""
    content_query_PRH = operands.content_query_PLH[:, block.rows]
    P, R, H = content_query_PRH.shape
    shape = (P, R, block.num_keys)
    scores = scratch.take("scores", *shape)
    positions = operands.positions(block)
    if positions is not None:
        position_query_nYX, position_nSX = positions
        torch.bmm(
            position_query_nYX,
            position_nSX.transpose(1, 2),
            out=scores.view(len(position_nSX), -1, shape[2]),
        )
    weights_PRS = scratch.take("weights", *shape) if reuse else scores.new_empty(shape)
    torch.bmm(content_query_PRH, operands.key_PCH[:, block.keys].transpose(1, 2), out=weights_PRS)
    if positions is not None:
        weights_PRS.add_(shifted(scores))
    weights_PRS.view(operands.num_heads, -1, R, block.num_keys)[..., -block.mask.shape[-1] :].add_(
        block.mask
    )
    torch.softmax(weights_PRS, dim=-1, out=weights_PRS)
    kept_PRS = weights_PRS if keep is None else dropped(weights_PRS, keep, out=scores)
    read_PRH = torch.bmm(
        kept_PRS, operands.value_PCH[:, block.keys], out=scratch.take("read", P, R, H)
    )
    return weights_PRS, read_PRH


def dropped(tile_PRS: Tensor, keep: Tensor, *, out: Tensor) -> Tensor:
    """The tile with zeros where `keep` [n, B, R, S] is False."""
    # A product with bytes is twice as fast as `where` or a product with booleans.
    torch.mul(tile_PRS.view(keep.shape), keep.view(torch.uint8), out=out.view(keep.shape))
    return out
