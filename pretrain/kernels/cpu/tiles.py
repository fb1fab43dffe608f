"""How the CPU attention is cut into tiles, and the scores of one tile.

A query sees one unbroken range of keys: from its first key (later with `max_distance` or a document
boundary) to itself. A tile is some heads of some lanes and a block of rows. It reads the keys from
the first that any of its rows sees to the own key of its last row, so keys that are hidden from the
whole tile cost nothing: about half of the segment's products, and all of what a window hides.

Letters of shapes as in `pretrain.model`. P are pairs of a head and a lane (head first), R rows, S
the keys that a tile reads, n its heads. Position terms have width X: H for encodings, 1 for a bias
per distance, which acts as an encoding that every query multiplies by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from pretrain.kernels.cpu.relative_shift import shifted


@dataclass(frozen=True)
class Tiling:
    """Sizes that fit a core's cache. Results of two tilings differ by rounding only."""

    # Queries of a block: fewer skip more keys after the query, more give better matrix products.
    rows: int = 128
    scores: int = 1 << 20  # of a tile: 4 MiB in float32


@dataclass(frozen=True)
class Block:
    """Rows of a tile and the keys they read; `mask` is for the last `mask.shape[-1]` keys."""

    rows: slice
    keys: slice
    mask: Tensor  # added to the scores: zero or minus infinity, [1 or lanes, rows, keys]

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass(frozen=True)
class Group:
    """Heads and lanes whose tiles share keys and values; blocks are in the order of rows."""

    heads: slice
    key_heads: slice  # the heads of keys and values that these heads read
    lanes: slice
    blocks: tuple[Block, ...]
    starts_key_heads: bool  # no group before it reads the same keys


def first_keys(
    num_queries: int, num_keys: int, max_distance: int | None, documents_BC: Tensor | None
) -> Tensor | None:
    """Return the first key each query sees, [1 or B, L]; None if all see key 0."""
    first = None
    if max_distance is not None:
        assert max_distance > 0, max_distance
        queries_L = torch.arange(num_keys - num_queries, num_keys)
        first = (queries_L - max_distance + 1).clamp_(min=0)[None]
    if documents_BC is not None:
        # Document ids ascend, so a document's first key is where its id would be inserted.
        documents_BC = documents_BC.contiguous()
        starts_BL = torch.searchsorted(documents_BC, documents_BC[:, -num_queries:].contiguous())
        first = starts_BL if first is None else torch.maximum(first, starts_BL)
    return first


def groups(
    query_BLNH: Tensor, num_key_heads: int, num_keys: int, first: Tensor | None, tiling: Tiling
) -> list[Group]:
    """Return groups that cover every head, lane and row once, ordered by heads and then lanes."""
    num_lanes, num_queries, num_heads, _ = query_BLNH.shape
    rows = list(even_parts(num_queries, tiling.rows))
    pairs = max(1, tiling.scores // (rows[0].stop * num_keys))  # of a head and a lane
    per_key = num_heads // num_key_heads
    # Lanes with different documents are not combined: a tile reads from the first key that any of
    # its lanes sees.
    most_lanes = num_lanes if first is None or len(first) == 1 else 1
    lanes_list = list(even_parts(num_lanes, min(most_lanes, pairs)))
    # Heads that share a key add to the same gradient, so they take turns.
    heads_per_tile = max(1, pairs // most_lanes) if per_key == 1 else 1
    size = rows[0].stop
    corner = torch.full((size, size), float("-inf"), dtype=query_BLNH.dtype).triu_(1)
    blocks = []
    for lanes in lanes_list:
        of_lanes = first if first is None or len(first) == 1 else first[lanes]
        num_memory = num_keys - num_queries
        blocks.append(tuple(_block(part, num_memory, of_lanes, corner) for part in rows))
    return [
        Group(
            heads=heads,
            key_heads=slice(heads.start // per_key, (heads.stop - 1) // per_key + 1),
            lanes=lanes,
            blocks=lane_blocks,
            starts_key_heads=heads.start % per_key == 0,
        )
        for heads in even_parts(num_heads, heads_per_tile)
        for lanes, lane_blocks in zip(lanes_list, blocks, strict=True)
    ]


def even_parts(total: int, largest: int) -> Iterator[slice]:
    """Cut `range(total)` into as few slices of at most `largest` as possible, the longest first."""
    count = -(-total // largest)
    size, longer = divmod(total, count)
    start = 0
    for index in range(count):
        stop = start + size + (index < longer)
        yield slice(start, stop)
        start = stop


def _block(rows: slice, num_memory: int, first: Tensor | None, corner: Tensor) -> Block:
    num_rows, end = rows.stop - rows.start, num_memory + rows.stop
    causal = corner[:num_rows, :num_rows]
    if first is None:
        return Block(rows, slice(0, end), causal[None])
    visible = first[:, rows]
    lowest, highest = int(visible.min()), int(visible.max())
    keys = slice(lowest, end)
    if lowest == highest:  # only the corner of the rows' own keys is ragged
        return Block(rows, keys, causal[None])
    hidden = torch.arange(lowest, end) < visible[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=corner.dtype).masked_fill_(hidden, float("-inf"))
    mask[:, :, -num_rows:] += causal
    return Block(rows, keys, mask)


class Scratch:
    """Buffers for the results of one tile; the next tile reuses them while they are in cache."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialized tensor; it overwrites what was last taken under `name`."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class Operands:
    """What the tiles of a group multiply. The queries include their bias and the scale."""

    num_heads: int
    content_query_PLH: Tensor
    key_PCH: Tensor
    value_PCH: Tensor
    position_query_nBLX: Tensor | None
    position_nCX: Tensor | None
    sinks_n: Tensor | None

    @classmethod
    def read(cls, group: Group, inputs: Sequence[Any], scratch: Scratch) -> Operands:
        """Gather the group's part of the inputs, heads first."""
        query_BLNH, position_CNX, content_bias_NH, position_bias_NH, sinks_N, *parts = inputs
        query = query_BLNH.permute(2, 0, 1, 3)[group.heads, group.lanes]
        heads, lanes, _, width = query.shape
        views = group_parts(group, parts)
        if len(views) == 1 and views[0].stride(-2) == width:  # a cache that is stored heads first
            key_value = views[0]
        else:
            num_keys = sum(part.shape[1] for part in parts)
            key_value = scratch.take("key and value", 2, heads, lanes, num_keys, width)
            for part, rows in zip(views, row_ranges(parts), strict=True):
                key_value[:, :, :, rows] = part
        key_PCH, value_PCH = key_value.flatten(1, 2)
        content = scratch.take("content query", *query.shape)
        content = _scaled(query, content_bias_NH, group, content)
        operands = (heads, content.flatten(0, 1), key_PCH, value_PCH)
        sinks_n = None if sinks_N is None else sinks_N[group.heads]
        if position_CNX is None:
            return cls(*operands, None, None, sinks_n)
        if position_bias_NH is None:
            position_query = query.new_ones(()).expand(*query.shape[:3], 1)
        else:
            position_query = scratch.take("position query", *query.shape)
            position_query = _scaled(query, position_bias_NH, group, position_query)
        position_nCX = position_CNX.transpose(0, 1)[group.heads]
        if position_nCX.stride(1) != position_nCX.shape[2]:
            position_nCX = scratch.take("position", *position_nCX.shape).copy_(position_nCX)
        return cls(*operands, position_query, position_nCX, sinks_n)

    def positions(self, block: Block) -> tuple[Tensor, Tensor] | None:
        """Return the block's position queries [n, B * R, X] and positions [n, S, X], if any."""
        if self.position_query_nBLX is None or self.position_nCX is None:
            return None
        # The block's last row is at distance 0 from its last key, so the last S positions are those
        # of its keys. For the rows above, `shifted` moves the products into place.
        query_nYX = self.position_query_nBLX[:, :, block.rows].flatten(1, 2)
        return query_nYX, self.position_nCX[:, -block.num_keys :]


def _scaled(query: Tensor, bias_NH: Tensor | None, group: Group, out: Tensor) -> Tensor:
    scale = query.shape[3] ** -0.5
    if bias_NH is None:
        return torch.mul(query, scale, out=out)
    return torch.add(bias_NH[group.heads, None, None] * scale, query, alpha=scale, out=out)


def group_parts(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the group's keys and values as views [2, n, B, rows, H] of [B, rows, 2, G, H]."""
    return [part[group.lanes, :, :, group.key_heads].permute(2, 3, 0, 1, 4) for part in parts]


def row_ranges(parts: Sequence[Tensor]) -> list[slice]:
    """Return the rows of each part in the concatenation of all."""
    stops = [sum(part.shape[1] for part in parts[: index + 1]) for index in range(len(parts))]
    return [slice(stop - part.shape[1], stop) for part, stop in zip(parts, stops, strict=True)]


def attend(
    operands: Operands, block: Block, keep: Tensor | None, scratch: Scratch, *, reuse: bool
) -> tuple[Tensor, Tensor]:
    """Return a tile's softmax [P, R, S] before dropout, and what its rows read [P, R, H].

    With `reuse` the softmax is scratch as well; what the rows read always is.
    """
    content_query_PRH = operands.content_query_PLH[:, block.rows]
    P, R, H = content_query_PRH.shape
    S = block.num_keys
    shape = (P, R, S)
    scores = scratch.take("scores", *shape)
    positions = operands.positions(block)
    if positions is not None:
        query_nYX, position_nSX = positions
        out = scores.view(len(position_nSX), -1, block.num_keys)
        torch.bmm(query_nYX, position_nSX.transpose(1, 2), out=out)
    weights_PRS = scratch.take("weights", *shape) if reuse else scores.new_empty(shape)
    torch.bmm(content_query_PRH, operands.key_PCH[:, block.keys].transpose(1, 2), out=weights_PRS)
    if positions is not None:
        weights_PRS.add_(shifted(scores))
    masked = weights_PRS.view(operands.num_heads, -1, R, block.num_keys)
    masked[..., -block.mask.shape[-1] :].add_(block.mask)
    if operands.sinks_n is None:
        torch.softmax(weights_PRS, dim=-1, out=weights_PRS)
    else:
        _softmax_with_sinks_(weights_PRS.view(operands.num_heads, -1, S), operands.sinks_n)
    kept_PRS = weights_PRS if keep is None else dropped(weights_PRS, keep, out=scores)
    read_PRH = scratch.take("read", P, R, H)
    return weights_PRS, torch.bmm(kept_PRS, operands.value_PCH[:, block.keys], out=read_PRH)


def _softmax_with_sinks_(scores_nYS: Tensor, sinks_n: Tensor) -> None:
    """Replace the scores by their softmax, whose denominators include the heads' sinks."""
    sinks_n11 = sinks_n[:, None, None]
    highest_nY1 = torch.maximum(scores_nYS.amax(-1, keepdim=True), sinks_n11)
    scores_nYS.sub_(highest_nY1).exp_()
    sums_nY1 = scores_nYS.sum(-1, keepdim=True).add_((sinks_n11 - highest_nY1).exp_())
    scores_nYS.div_(sums_nY1)


def dropped(tile_PRS: Tensor, keep: Tensor, *, out: Tensor) -> Tensor:
    """Return the tile with zeros where `keep` [n, B, R, S] is False."""
    # A product with bytes is twice as fast as `where` or a product with booleans.
    torch.mul(tile_PRS.view(keep.shape), keep.view(torch.uint8), out=out.view(keep.shape))
    return out
