"""What the fused kernels support, and what they are compiled for: variants of the code and tiles.

This module does not import triton, so that a caller can ask before it imports the kernels.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch

LARGEST_HEAD = 128
DTYPES = (torch.bfloat16, torch.float16)
# GPUs whose shared memory holds the tiles; the kernels are compiled offline for the first two.
CAPABILITIES = ((8, 0), (9, 0), (10, 0))
DROPOUT_LEVELS = 1 << 16  # probabilities are multiples of 1/65536, as in pretrain.model.dropout

# 8 heads of 2,048 queries and 4,096 keys in bf16: 512 programs, enough for the largest GPU.
WORKSPACE_BYTES = 128 << 20
# Arguments of the backward kernels that name the lanes and groups of a launch. The compiler must
# not make a variant for each value.
CHUNK = ("first_lane", "first_group", "chunk_groups", "chunk_lanes")


def interprets_kernels() -> bool:
    """Whether triton runs kernels in its interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def unsupported_reason(device: torch.device, dtype: torch.dtype, head_width: int) -> str | None:
    """Return why the fused kernel does not support such tensors, or None if it does."""
    if head_width > LARGEST_HEAD:
        return f"the head width is {head_width}; the fused kernel supports at most {LARGEST_HEAD}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interprets_kernels():
        supported = dtype in (*DTYPES, torch.float32)
        return None if supported else f"the interpreter does not support {dtype}"
    if device.type != "cuda" or torch.version.hip:
        return f"the fused kernel needs an NVIDIA GPU; the tensors are on '{device}'"
    if dtype not in DTYPES:
        return f"the tensors are {dtype}; the fused kernel supports bfloat16 and float16"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        major, minor = capability
        return f"the GPU has compute capability {major}.{minor}; the kernel supports {known}"
    return None


@dataclass(frozen=True)
class Tile:
    """`rows` queries and `columns` keys, or position rows in the kernel of their gradient."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 1

    def __post_init__(self) -> None:
        for size in (self.rows, self.columns):
            assert size >= 16, self
            assert size & (size - 1) == 0, self


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One `Tile` per kernel."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    position_gradient: Tile

    def __post_init__(self) -> None:
        # A warp of the tensor cores takes 16 rows of a product, or a group of four takes 64. With
        # fewer rows than that, warps would repeat each other's work.
        for tile in (self.forward, self.query_gradient):
            assert 16 * tile.warps <= tile.rows, tile
        for tile in (self.key_gradient, self.position_gradient):  # their products are transposed
            assert 16 * tile.warps <= tile.columns, tile
        assert self.forward.rows in (self.forward.columns, 2 * self.forward.columns), self.forward
        assert self.key_gradient.rows <= self.key_gradient.columns, self.key_gradient


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
class Variant:
    """A kernel's compile-time constants, in one object that all of its functions take."""

    num_heads: int
    num_groups: int  # of heads that share a key and value
    head_width: int
    key_row: int  # elements from one key of a lane to the next, and from one group to the next
    key_head: int
    value_row: int
    value_head: int
    rows: int
    columns: int
    has_position: bool
    has_starts: bool  # documents are isolated
    has_key_bias: bool
    has_distance_bias: bool
    drop_threshold: int  # of DROPOUT_LEVELS
    adds_positions: bool  # in the kernel of the queries' gradient
    precision: str  # of products of float32; "ieee" or "tf32"

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def padded_width(self) -> int:
        """The head width padded to a power of two, at least 16 for the tensor cores."""
        return max(16, 1 << (self.head_width - 1).bit_length())

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_width)

    @property
    def scale_log2(self) -> float:
        return self.scale * math.log2(math.e)

    @property
    def keep_scale(self) -> float:
        return DROPOUT_LEVELS / (DROPOUT_LEVELS - self.drop_threshold)


# By compute capability and padded head width. Found by compiling all shapes offline
# (`python -m benchmarks kernels`): no warp repeats work, two programs share a multiprocessor where
# possible, and few registers spill. Heads narrower than 64 use the tiles of 64.
_TILES = {
    (8, 64): Tiles(
        forward=Tile(64, 64, 4, 2),
        query_gradient=Tile(64, 64, 4, 2),
        key_gradient=Tile(32, 64, 4, 2),
        position_gradient=Tile(64, 64, 4, 2),
    ),
    (8, 128): Tiles(
        forward=Tile(64, 32, 4, 2),
        query_gradient=Tile(64, 32, 4, 2),
        key_gradient=Tile(32, 64, 4, 2),
        position_gradient=Tile(64, 64, 4, 2),
    ),
    (9, 64): Tiles(
        forward=Tile(64, 64, 4, 2),
        query_gradient=Tile(64, 64, 4, 2),
        key_gradient=Tile(32, 64, 4, 2),
        position_gradient=Tile(64, 64, 4, 2),
    ),
    (9, 128): Tiles(
        forward=Tile(64, 32, 4, 2),
        query_gradient=Tile(64, 32, 4, 2),
        key_gradient=Tile(32, 64, 4, 1),
        position_gradient=Tile(64, 64, 4, 2),
    ),
}


def tiles_for(head_width: int, capability: tuple[int, int]) -> Tiles:
    """Return the tiles for a head width and compute capability; newer GPUs use the tiles of 9."""
    return _TILES[min(capability[0], 9), 64 if head_width <= 64 else 128]
