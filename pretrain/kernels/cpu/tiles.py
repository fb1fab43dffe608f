"""How the CPU attention cuts its work into tiles, and what each tile may see: arithmetic on integers and small masks.

B lanes, L queries, M memory rows, C = M + L keys.

Every query sees one unbroken range of keys: from its first key (moved up by `max_distance` or by its document's start)
to itself. A tile is some heads of some lanes and a block of rows; it reads the keys from the first that any of its rows
sees to its last row's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiling:
    """Sizes that suit a core's cache. Results differ between tilings by rounding only."""

    rows: int = 128  # queries of a block; fewer skip more keys after the query, more make better matrix products
    scores: int = 1 << 20  # of a tile: 4 MiB in float32


@dataclass(frozen=True)
class Block:
    """Rows of a tile and the keys they read, with what to add to the scores of the last `mask.shape[-1]` keys."""

    rows: slice
    keys: slice
    mask: Tensor  # zero or minus infinity, [1 or lanes, rows, keys]

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass(frozen=True)
class Group:
    """Heads and lanes whose tiles share keys and values; the blocks run from the first rows to the last."""

    heads: slice
    key_heads: slice  # the heads of keys and values that these heads read
    lanes: slice
    blocks: tuple[Block, ...]
    starts_key_heads: bool  # no group before it reads the same keys


def first_keys(
    num_queries: int,
    num_keys: int,
    max_distance: int | None = None,
    documents_BC: Tensor | None = None,
) -> Tensor | None:
    """The first key each query sees, [1 or B, L]; None if all see from key 0 on."""
    first = None
    if max_distance is not None:
        assert max_distance > 0, max_distance
        first = (torch.arange(num_keys - num_queries, num_keys) - max_distance + 1).clamp_(min=0)[
            None
        ]
    if documents_BC is not None:
        # Documents are numbered in order, so a document's first key is where its number would be inserted.
        documents_BC = documents_BC.contiguous()
        starts_BL = torch.searchsorted(documents_BC, documents_BC[:, -num_queries:].contiguous())
        first = starts_BL if first is None else torch.maximum(first, starts_BL)
    return first


def groups(
    num_heads: int,
    num_key_heads: int,
    num_lanes: int,
    num_queries: int,
    num_keys: int,
    first: Tensor | None,
    tiling: Tiling,
    dtype: torch.dtype,
) -> list[Group]:
    """Every head, lane and row once: heads in order, and for each all lanes in order."""
    rows = list(even_parts(num_queries, tiling.rows))
    pairs = max(1, tiling.scores // (rows[0].stop * num_keys))  # of a head and a lane
    per_key = num_heads // num_key_heads
    # Lanes with documents of their own stay apart: a tile reads from the first key that any of its lanes needs.
    most_lanes = num_lanes if first is None or len(first) == 1 else 1
    lanes_list = list(even_parts(num_lanes, min(most_lanes, pairs)))
    # Heads that share their keys add to the same gradient, one after the other.
    heads_per_tile = max(1, pairs // most_lanes) if per_key == 1 else 1
    corner = torch.full((rows[0].stop, rows[0].stop), float("-inf"), dtype=dtype).triu_(1)
    blocks = [
        tuple(
            _block(part, num_keys - num_queries, _of_lanes(first, lanes), corner) for part in rows
        )
        for lanes in lanes_list
    ]
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
    """`range(total)` in order, in as few slices of at most `largest` as possible, the longest first."""
    count = -(-total // largest)
    size, longer = divmod(total, count)
    start = 0
    for index in range(count):
        stop = start + size + (index < longer)
        yield slice(start, stop)
        start = stop


def _of_lanes(first: Tensor | None, lanes: slice) -> Tensor | None:
    return first if first is None or len(first) == 1 else first[lanes]


def _block(rows: slice, num_memory: int, first: Tensor | None, corner: Tensor) -> Block:
    num_rows = rows.stop - rows.start
    end = num_memory + rows.stop
    causal = corner[:num_rows, :num_rows]
    if first is None:
        return Block(rows, slice(0, end), causal[None])
    visible = first[:, rows]
    lowest, highest = int(visible.min()), int(visible.max())
    keys = slice(lowest, end)
    if lowest == highest:
        return Block(rows, keys, causal[None])
    hidden = torch.arange(lowest, end) < visible[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=corner.dtype).masked_fill_(hidden, float("-inf"))
    mask[:, :, -num_rows:] += causal
    return Block(rows, keys, mask)
