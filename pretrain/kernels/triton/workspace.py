"""The workspace of the fused backward pass: gradients of the scores of a few heads. Torch-free.

`pretrain.costs` counts it from the same numbers that the launcher allocates it by.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from pretrain.kernels.triton.tiling import Tiles

# Programs of the keys' kernel that fill a device: two waves on 160 multiprocessors, two on each.
# They decide the workspace's size, so it is the same on every GPU: the order of sums depends on it.
FILLING_PROGRAMS = 640
# What a workspace may take for that; a 40th of 80 GiB.
WORKSPACE_BYTES = 2 << 30
# Arguments of the backward kernels that name the lanes and groups of a launch. The compiler must
# not make a variant for each value.
CHUNK = ("first_lane", "first_group", "chunk_groups", "chunk_lanes")


class Chunk(NamedTuple):
    """Lanes and groups of heads whose backward pass shares the workspace."""

    first_lane: int
    lanes: int
    first_group: int
    groups: int


def chunks_of(num_lanes: int, num_groups: int, fitting: int, filling: int) -> list[Chunk]:
    """Return whole lanes, or some groups of one lane, in chunks as equal as possible.

    None has more than the `fitting` groups, or fewer than the `filling` ones if those fit.
    """
    if min(fitting, filling) < num_groups:
        lanes, groups = _parts(num_lanes, 1, 1), _parts(num_groups, fitting, filling)
    else:
        lanes = _parts(num_lanes, fitting // num_groups, -(-filling // num_groups))
        groups = [(0, num_groups)]
    return [Chunk(*of_lanes, *of_groups) for of_lanes in lanes for of_groups in groups]


def _parts(total: int, most: int, least: int) -> list[tuple[int, int]]:
    """Return start and size of as many parts as have `least`, or of more if `most` says so."""
    count = max(-(-total // most), total // least, 1)
    starts = [total * part // count for part in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(starts)]


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What one call needs: a row for each query of a chunk's heads, with a column for each key."""

    chunks: list[Chunk]
    score_row: int  # columns of a row: whole tiles, so that loads and stores need no mask
    elements: int
    heads_per_program: int  # of the keys' kernel: those of a group, or 1 to fill the device
    summed_elements: int  # of float32, if heads of a group are summed after the kernel

    def num_bytes(self, element_bytes: int) -> int:
        """Return the bytes of scores and sums."""
        return element_bytes * self.elements + 4 * self.summed_elements


def workspace_of(
    *,
    lanes: int,
    queries: int,
    keys: int,
    heads: int,
    groups: int,
    head_width: int,
    tiles: Tiles,
    element_bytes: int,
    limit: int = WORKSPACE_BYTES,
) -> Workspace:
    """Return the smallest workspace that fills a device, in `limit` bytes or for one group."""
    widest = max(tiles.query_gradient.columns, tiles.key_gradient.columns)
    score_row = -(-keys // widest) * widest
    group_heads, programs = heads // groups, -(-keys // tiles.key_gradient.columns)
    group_scores = group_heads * queries * score_row
    fitting = max(1, limit // (group_scores * element_bytes))
    chunks = chunks_of(lanes, groups, fitting, -(-FILLING_PROGRAMS // programs))
    largest = max(chunk.lanes * chunk.groups for chunk in chunks)
    is_split = group_heads > 1 and len(chunks) == 1 and largest * programs < FILLING_PROGRAMS
    return Workspace(
        chunks=chunks,
        score_row=score_row,
        elements=largest * group_scores,
        heads_per_program=1 if is_split else group_heads,
        summed_elements=2 * lanes * keys * heads * head_width if is_split else 0,
    )
