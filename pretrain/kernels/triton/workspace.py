"""The workspace of the fused backward pass: gradients of the scores of a few heads. Torch-free.

`pretrain.costs` counts it from the same numbers that the launcher allocates it by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pretrain.kernels.triton.tiling import Tiles

# 8 heads of 2,048 queries and 4,096 keys in bf16: 512 programs, enough for the largest GPU.
WORKSPACE_BYTES = 128 << 20
# Arguments of the backward kernels that name the lanes and groups of a launch. The compiler must
# not make a variant for each value.
CHUNK = ("first_lane", "first_group", "chunk_groups", "chunk_lanes")


class Chunk(NamedTuple):
    """Lanes and groups of heads whose backward pass shares the workspace."""

    first_lane: int
    lanes: int
    first_group: int
    groups: int


def chunks_of(num_lanes: int, num_groups: int, fitting: int) -> list[Chunk]:
    """Return whole lanes if the `fitting` groups include any, or else some groups of one lane."""
    lanes, groups = max(1, fitting // num_groups), min(fitting, num_groups)
    return [
        Chunk(lane, min(lanes, num_lanes - lane), group, min(groups, num_groups - group))
        for lane in range(0, num_lanes, lanes)
        for group in range(0, num_groups, groups)
    ]


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What one call needs: a row for each query of a chunk's heads, with a column for each key."""

    chunks: list[Chunk]
    score_row: int  # columns of a row: whole tiles, so that loads and stores need no mask
    elements: int


def workspace_of(
    *,
    lanes: int,
    queries: int,
    keys: int,
    heads: int,
    groups: int,
    tiles: Tiles,
    element_bytes: int,
    limit: int = WORKSPACE_BYTES,
) -> Workspace:
    """Return the workspace for as many groups of heads as `limit` bytes hold, at least for one."""
    widest = max(tiles.query_gradient.columns, tiles.key_gradient.columns)
    score_row = -(-keys // widest) * widest
    group_scores = heads // groups * queries * score_row
    chunks = chunks_of(lanes, groups, max(1, limit // (group_scores * element_bytes)))
    largest = max(chunk.lanes * chunk.groups for chunk in chunks)
    return Workspace(chunks=chunks, score_row=score_row, elements=largest * group_scores)
