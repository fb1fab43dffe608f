"""Attention by distance on the CPU: tiles that stay in cache, with their own backward pass.

The score of query i and key j at distance t = i + M - j is

    [(q_i + u) . k_j + (q_i + v) . r_t] / sqrt(H) + b_t

The paper's positions have u, v and r; a bias per distance has b; rotated queries and keys need
neither. A sink adds one more score, with a value of zero, to each head's softmax.

Letters of shapes as in `pretrain.model`. P are pairs of a head and a lane (heads outermost), R a
tile's rows, S the keys that it reads, n its heads. Position terms have width X: H for encodings, 1
for a bias per distance, which is treated as an encoding that every query multiplies by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# The relative shift (appendix B of the paper) turns scores by distance into scores by key. The
# product of queries and projected positions has a column for each distance from the tile's last
# row, the farthest first. Key j of row i needs column j + R - 1 - i, so each row has to move left
# by one column less than the row above it. Instead of moving anything, these functions view the
# same memory with other strides:
#
#     R = 3 rows, S = 5 columns: the product     the same elements, by key
#     . . a b c                                  a b c ' '    row 0 moved left by 2
#     . d e f g                                  d e f g '    row 1 moved left by 1
#     h i j k l                                  h i j k l    row 2, the last: unchanged
#
# Row i of the result starts at element R - 1 + i (S - 1) of the flat product: the view has offset
# R - 1 and row stride S - 1 instead of S. Products marked "." belong to no key of the tile.
# Entries marked "'" come after the row's own key and are elements of the next row; the causal
# mask hides them.


def relative_shift(padded: Tensor) -> Tensor:
    """Return a view of [X, L, 1 + C] with row i moved left by L - 1 - i: [X, L, C].

    The first column is padding: with it a plain `view` makes the shift, and autograd undoes it.
    """
    batch, num_queries, width = padded.shape
    return padded.view(batch, width, num_queries)[:, 1:].view(batch, num_queries, width - 1)


def shifted(tile_PRS: Tensor) -> Tensor:
    """Return a view of a contiguous tile with row i moved left by R - 1 - i, unpadded."""
    P, R, S = tile_PRS.shape
    return tile_PRS.as_strided((P, R, S), (R * S, S - 1, 1), tile_PRS.storage_offset() + R - 1)


def unshift_(tile_PRS: Tensor, shifted_PRS: Tensor) -> None:
    """Fill `tile_PRS` so that `shifted` turns it into `shifted_PRS`, the gradient of the scores.

    Entries of `shifted_PRS` for keys after the query must be zero.
    """
    P, R, S = shifted_PRS.shape
    flat = tile_PRS.view(P, R * S)
    flat[:, : R - 1] = 0
    # Rows of S elements with stride S - 1 overlap by one element, which two threads would write. So
    # the last column is copied separately: it holds the last row's own key, and zeros.
    flat[:, R - 1 : -1].view(P, R, S - 1).copy_(shifted_PRS[:, :, :-1])
    flat[:, -1] = shifted_PRS[:, -1, -1]


@dataclass(frozen=True)
class Tiling:
    """Sizes that fit a core's cache. Results of two tilings differ by rounding only."""

    # Queries of a block. Smaller blocks skip more of the keys after a query; larger ones make
    # larger, more efficient matrix products.
    rows: int = 128
    scores: int = 1 << 20  # scores of a tile: 4 MiB in float32


@dataclass(frozen=True)
class Block:
    """Rows of a tile and the keys they read; `mask` applies to the last `mask.shape[-1]` keys."""

    rows: slice
    keys: slice
    mask: Tensor  # added to the scores: zero or minus infinity, [1 or lanes, rows, keys]

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass(frozen=True)
class Group:
    """Heads and lanes whose tiles share keys and values, with blocks in the order of rows."""

    heads: slice
    key_heads: slice  # the heads of keys and values that these heads read
    lanes: slice
    blocks: tuple[Block, ...]
    starts_key_heads: bool  # whether no earlier group reads the same keys


def first_keys(
    num_queries: int, num_keys: int, max_distance: int | None, documents_BC: Tensor | None
) -> Tensor | None:
    """Return the first key that each query sees, [1 or B, L]; None if all see the first one."""
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
    """Return groups that cover every head, lane and row once, ordered by heads and then lanes.

    A query sees one unbroken range of keys, from its first one to itself; `max_distance` and
    document boundaries make the first one later. A tile, a block of rows of some heads and lanes,
    reads the keys from the first that any of its rows sees to the last row's own key. So keys that
    are hidden from the whole tile cost nothing: about half of the segment's products, and all keys
    beyond `max_distance`.
    """
    num_lanes, num_queries, num_heads, _ = query_BLNH.shape
    rows = list(even_parts(num_queries, tiling.rows))
    pairs = max(1, tiling.scores // (rows[0].stop * num_keys))  # pairs of head and lane in a tile
    per_key = num_heads // num_key_heads
    # Do not combine lanes with different documents: the tile would read from the first key that any
    # of its lanes sees.
    most_lanes = num_lanes if first is None or len(first) == 1 else 1
    lanes_list = list(even_parts(num_lanes, min(most_lanes, pairs)))
    # Heads that share a key head add to the same gradient, so each gets a tile of its own: the
    # first one writes the gradient, the others add to it (`starts_key_heads`).
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
    if lowest == highest:  # all rows begin at the same key: only the causal corner is masked
        return Block(rows, keys, causal[None])
    hidden = torch.arange(lowest, end) < visible[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=corner.dtype).masked_fill_(hidden, float("-inf"))
    mask[:, :, -num_rows:] += causal
    return Block(rows, keys, mask)


class Scratch:
    """Buffers for one tile's results, which the next tile overwrites while they are in cache."""

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
    """The factors of a group's matrix products. Bias and scale are already in the queries."""

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
        # A key-value cache of evaluation is stored with heads outermost: no copy is needed.
        if len(views) == 1 and views[0].stride(-2) == width:
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
    """Return a tile's softmax [P, R, S] before dropout, and the attended values [P, R, H].

    The values are in a scratch buffer; with `reuse` the softmax is, too.
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
    kept_PRS = weights_PRS if keep is None else masked_by(weights_PRS, keep, out=scores)
    read_PRH = scratch.take("read", P, R, H)
    return weights_PRS, torch.bmm(kept_PRS, operands.value_PCH[:, block.keys], out=read_PRH)


def _softmax_with_sinks_(scores_nYS: Tensor, sinks_n: Tensor) -> None:
    """Replace the scores by their softmax, whose denominators include the heads' sinks."""
    sinks_n11 = sinks_n[:, None, None]
    highest_nY1 = torch.maximum(scores_nYS.amax(-1, keepdim=True), sinks_n11)
    scores_nYS.sub_(highest_nY1).exp_()
    sums_nY1 = scores_nYS.sum(-1, keepdim=True).add_((sinks_n11 - highest_nY1).exp_())
    scores_nYS.div_(sums_nY1)


def masked_by(tile_PRS: Tensor, keep: Tensor, *, out: Tensor) -> Tensor:
    """Return the tile with zeros where `keep` [n, B, R, S] is False."""
    # Multiplying by bytes is twice as fast as `where` or multiplying by booleans.
    torch.mul(tile_PRS.view(keep.shape), keep.view(torch.uint8), out=out.view(keep.shape))
    return out


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
    """Return the attended values of each query, [B, L, N, H].

    Gradients flow to the tensors up to `sinks_N`. `key_value_parts` are [B, rows, 2, G, H]: the
    projected keys and values of the memory's rows, then of the segment's. Together they are the C
    keys; the queries belong to the last L. N / G consecutive heads share a key head.
    `position_CNH` are the projected encodings W_R R, with row j for distance C - 1 - j;
    `distance_bias_CN` replaces them, in the same order.

    A query does not see keys after it, keys at `max_distance` or farther (`same_length`), and keys
    of other documents. Document ids `documents_BC` must not decrease along C. Weights are set to
    zero where `keep_NBLC` is False, and divided by `keep_probability` elsewhere.
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
    """Attention that keeps its inputs and each tile's softmax for the backward pass.

    The backward pass gathers operands and masks weights again, tile by tile: that costs less time
    than to read them back from host memory.
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
                keep = _kept_part(keep_NBLC, group, block)
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
            # Start with the last rows: they see the most keys, so they initialize all sums.
            for block, weights_PRS in reversed(blocks):
                keep = _kept_part(keep_NBLC, group, block)
                gradients.add_tile(operands, group, block, weights_PRS, keep, output_PLH)
            gradients.store_keys(group)
        return (None, None, None, None, *gradients.of_inputs())


def _kept_part(keep_NBLC: Tensor | None, group: Group, block: Block) -> Tensor | None:
    if keep_NBLC is None:
        return None
    return keep_NBLC[group.heads, group.lanes, block.rows, block.keys]


class Gradients:
    """The gradients of the inputs, summed over tiles always in the order of the plan."""

    def __init__(self, inputs: Sequence[Any], scratch: Scratch, *, wants_positions: bool) -> None:
        query_BLNH, position_CNX, content_bias_NH, position_bias_NH, sinks_N, *parts = inputs
        self._scratch = scratch
        self._scale = query_BLNH.shape[3] ** -0.5
        self._query_BLNH = torch.empty_like(query_BLNH, memory_format=torch.contiguous_format)
        # Stored as [N, X, C]: matrix products are faster with the wider matrix on the right.
        self._position_NXC: Tensor | None = None
        if position_CNX is not None and (wants_positions or position_bias_NH is not None):
            self._position_NXC = position_CNX.new_zeros(position_CNX.permute(1, 2, 0).shape)
        self._content_bias_NH, self._position_bias_NH = (
            None if bias_NH is None else torch.zeros_like(bias_NH)
            for bias_NH in (content_bias_NH, position_bias_NH)
        )
        self._sinks_N = None if sinks_N is None else torch.zeros_like(sinks_N)
        self._sums: dict[str, Tensor] = {}  # the current group's gradients of keys and values
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
        """Add a block's contribution. Blocks have to come from the last rows to the first.

        `output_PLH` is the gradient of the group's attended values, already divided by the
        probability of keeping a weight.
        """
        take = self._scratch.take
        output_PRH = output_PLH[:, block.rows]
        work_PRS = take("scores", *weights_PRS.shape)
        kept_PRS = weights_PRS if keep is None else masked_by(weights_PRS, keep, out=work_PRS)
        self._add_to_keys("value gradient", operands.value_PCH.shape, block, kept_PRS, output_PRH)
        torch.bmm(output_PRH, operands.value_PCH[:, block.keys].transpose(1, 2), out=work_PRS)
        if keep is not None:
            masked_by(work_PRS, keep, out=work_PRS)
        scores_PRS = take("score gradient", *weights_PRS.shape)
        torch.ops.aten._softmax_backward_data.out(
            work_PRS, weights_PRS, -1, weights_PRS.dtype, grad_input=scores_PRS
        )
        if self._sinks_N is not None:
            # The softmax does not change when one number is added to all scores of a row and to the
            # sink. So their gradients sum to zero, and the sink's is minus the sum of the others.
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
        """Add to the gradient of positions; return the queries' gradient through them, if any."""
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
        if block.keys.stop == shape[1]:  # the last rows, whose block comes first
            self._sums[name] = total_PCH = self._scratch.take(name, *shape)
            if block.keys.start == 0:
                torch.bmm(left_PSR, right_PRH, out=total_PCH)
                return
            total_PCH.zero_()
        # `baddbmm_` would be slower: since the target's rows are not dense, it works pair by pair.
        product_PSH = self._scratch.take("key product", *left_PSR.shape[:2], shape[2])
        self._sums[name][:, block.keys].add_(torch.bmm(left_PSR, right_PRH, out=product_PSH))

    def _position_product(self, distances_PRS: Tensor, position_nSH: Tensor) -> Tensor:
        P, R, S = distances_PRS.shape
        heads, _, H = position_nSH.shape
        result_PRH = self._scratch.take("position read", P, R, H)
        # With one head, many small products are a third faster than one tall and narrow product.
        if heads == 1:
            return torch.bmm(distances_PRS, position_nSH.expand(P, S, H), out=result_PRH)
        torch.bmm(distances_PRS.view(heads, -1, S), position_nSH, out=result_PRH.view(heads, -1, H))
        return result_PRH

    def _add_to_bias(self, group: Group, bias_NH: Tensor | None, query_PRH: Tensor) -> None:
        if bias_NH is not None:
            heads = group.heads.stop - group.heads.start
            bias_NH[group.heads] += query_PRH.view(heads, -1, query_PRH.shape[2]).sum(1)
