"""Tiles of the fused kernels by compute capability and head width, and workspace. Torch-free.

The tiles that a search on a GPU found to be the fastest, in a table beside the kernels.

`make gpu` searches and writes the table, for the device it runs on; to use these tiles,
copy it to `TABLE`. Other tiles round differently, so a run records which table it used. Format:
{"format": 1, "kernels": version, "tiles": [row, ...], "tried": [row, ...]}, with a row such as
{"capability": [9, 0], "head_width": 128, "kernel": "forward", "rows": 64, "columns": 32,
"warps": 4, "stages": 2, "seconds": 0.0012}. `kernel` is a field of `Tiles`, and the tiles of a head
width serve all multiples of 8 that are padded to the same one.

The workspace of the backward pass holds gradients of the scores of a few heads. `pretrain.costs`
counts it from the numbers that the launcher allocates it by.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from foundation.errors import ConfigError
from foundation.files import SMALL_FILE_BYTES, read_regular, read_value, sha256_of
from foundation.typed_values import Count, Line, Positive, between, one_of

_ALIGNED_WIDTH = 8  # whose multiples are rows of 16 bytes; loads of others take more registers
TABLE = Path(__file__).with_name("tiles.json")
FORMAT = 1
LARGEST_SIZE, LARGEST_WARPS, MOST_STAGES = 256, 16, 8
_SOURCES = ("kernels", "tiles")
# Programs of the keys' kernel that fill a device: two waves on 160 multiprocessors, two on each.
# They decide the workspace's size, so it is the same on every GPU: the order of sums depends on it.
FILLING_PROGRAMS = 640
# What a workspace may take for that; a 40th of 80 GiB.
WORKSPACE_BYTES = 2 << 30
# Arguments of the backward kernels that name the lanes and groups of a launch. The compiler must
# not make a variant for each value.
CHUNK = ("first_lane", "first_group", "chunk_groups", "chunk_lanes")


@dataclass(frozen=True)
class Tile:
    """`rows` queries and `columns` keys, or position rows in the kernel of their gradient.

    ValueError if no kernel takes it.
    """

    rows: int
    columns: int
    warps: int = 4
    stages: int = 1

    def __post_init__(self) -> None:
        sizes = (self.rows, self.columns)
        _require(min(sizes) >= 16 and all(map(_is_power_of_two, (*sizes, self.warps))), self)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One `Tile` per kernel; ValueError if a kernel does not take its own."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    position_gradient: Tile

    def __post_init__(self) -> None:
        # A warp of the tensor cores takes 16 rows of a product, or a group of four takes 64. With
        # fewer rows than that, warps would repeat each other's work.
        for tile in (self.forward, self.query_gradient):
            _require(16 * tile.warps <= tile.rows, tile)
        for tile in (self.key_gradient, self.position_gradient):  # their products are transposed
            _require(16 * tile.warps <= tile.columns, tile)
        square = (self.forward.columns, 2 * self.forward.columns)
        _require(self.forward.rows in square, self.forward)
        _require(self.key_gradient.rows <= self.key_gradient.columns, self.key_gradient)


def _require(fits: bool, tile: Tile) -> None:
    if not fits:
        raise ValueError(f"no kernel takes {tile}")


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


# Found by compiling all shapes offline (`python -m benchmarks kernels`): no warp repeats work, two
# programs share a multiprocessor where possible, and few registers spill. Heads narrower than 64
# use the tiles of 64.
_OF_64 = Tiles(
    forward=Tile(64, 64, 4, 2),
    query_gradient=Tile(64, 64, 4, 2),
    key_gradient=Tile(32, 64, 4, 2),
    position_gradient=Tile(64, 64, 4, 2),
)
_OF_128 = replace(_OF_64, forward=Tile(64, 32, 4, 2), query_gradient=Tile(64, 32, 4, 2))
_TILES = {  # by compute capability and padded head width
    (8, 64): _OF_64,
    (8, 128): _OF_128,
    (9, 64): _OF_64,
    (9, 128): replace(_OF_128, key_gradient=Tile(32, 64, 4, 1)),
}


_UNALIGNED_FORWARD, _UNALIGNED_KEYS = Tile(64, 32, 4, 1), Tile(16, 64, 4, 1)


def built_in_tiles(head_width: int, capability: tuple[int, int], is_timed: bool = False) -> Tiles:
    """Return the tiles for a head width and compute capability; newer GPUs use the tiles of 9."""
    tiles = _TILES[min(capability[0], 9), tiled_width(head_width)]
    if capability[0] == 9 and head_width == 128 and is_timed:
        # An H200's fastest of 23 and 39 with relative positions and without dropout, although the
        # first lets one program run at a time and spills 248 bytes.
        tiles = replace(tiles, forward=Tile(64, 64, 4, 3), query_gradient=Tile(64, 32, 4, 3))
    if is_aligned(head_width):
        return tiles
    tiles = replace(tiles, forward=_UNALIGNED_FORWARD)
    # Wide heads of an even width are loaded in words, which leaves registers for the usual tile.
    is_wide_and_even = head_width > 64 and head_width % 2 == 0
    return tiles if is_wide_and_even else replace(tiles, key_gradient=_UNALIGNED_KEYS)


def is_aligned(head_width: int) -> bool:
    """Return whether loads of 16 bytes fit a head's rows, so that a table's tiles serve it."""
    return head_width % _ALIGNED_WIDTH == 0


def tiled_width(head_width: int) -> int:
    """Return the head width whose tiles serve this one."""
    return 64 if head_width <= 64 else 128


KERNELS = tuple(field.name for field in fields(Tiles))


def tiles_for(head_width: int, capability: tuple[int, int], is_timed: bool = False) -> Tiles:
    """Return the tiles for a head width and compute capability; `is_timed`: relative, no dropout.

    ConfigError if there is a table that does not fit the device or these kernels.
    """
    return _read_once(TABLE, head_width, capability, is_timed)


def table_name() -> str:
    """Return what identifies the tiles in use: a table's hash, or that they are built in."""
    return sha256_of(TABLE)[:12] if TABLE.exists() else "built in"


@functools.cache
def kernels_version() -> str:
    """Return a hash of the kernels' source, which decides what is fastest."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(read_regular(Path(__file__).with_name(f"{name}.py"), SMALL_FILE_BYTES))
    return digest.hexdigest()[:12]


def tiles_in(
    path: Path, head_width: int, capability: tuple[int, int], is_timed: bool = False
) -> Tiles:
    """Return the tiles of the table at `path`, and built-in ones for what it does not have.

    ConfigError if it does not fit the device or these kernels.
    """
    configured = built_in_tiles(head_width, capability, is_timed)
    if not path.exists():
        return configured
    try:
        table = read_value(_Table, path, is_open=True)
        tiles = _tiles_for(table, tiled_width(head_width), capability)
        return replace(configured, **tiles) if is_aligned(head_width) else configured
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be used: {error}; remove it, or search again on this "
            "device (make gpu STEPS=tiles) and copy the new table there"
        ) from None


_read_once = functools.cache(tiles_in)  # asked by every layer of every step


@dataclass(frozen=True)
class _Row:
    kernel: Annotated[str, one_of(*KERNELS)]
    capability: tuple[Count, Count]
    head_width: Positive
    rows: Annotated[int, between(16, LARGEST_SIZE)]
    columns: Annotated[int, between(16, LARGEST_SIZE)]
    warps: Annotated[int, between(1, LARGEST_WARPS)]
    stages: Annotated[int, between(1, MOST_STAGES)]


@dataclass(frozen=True)
class _Table:
    format: Annotated[int, between(FORMAT, FORMAT)]
    kernels: Line
    tiles: tuple[_Row, ...]


def _tiles_for(table: _Table, width: int, capability: tuple[int, int]) -> dict[str, Tile]:
    """Return the tiles by kernel that the table has for the width; ValueError if none fit."""
    if table.kernels != kernels_version():
        raise ValueError(f"it is for kernels {table.kernels}, these are {kernels_version()}")
    capabilities = {row.capability for row in table.tiles}
    if capability not in capabilities:
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
        raise ValueError(
            f"it is for compute capability {known or 'of no device'}, "
            f"found {capability[0]}.{capability[1]}"
        )
    tiles: dict[str, Tile] = {}
    for row in table.tiles:
        if row.capability == capability and tiled_width(row.head_width) == width:
            if row.kernel in tiles:
                raise ValueError(f"it has two tiles of {row.kernel} for heads of {width}")
            tiles[row.kernel] = Tile(row.rows, row.columns, row.warps, row.stages)
    return tiles


class Chunk(NamedTuple):
    """Lanes and groups of heads whose backward pass shares the workspace."""

    first_lane: int
    lanes: int
    first_group: int
    groups: int


def lane_chunks(num_lanes: int, num_groups: int, fitting: int, filling: int) -> list[Chunk]:
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
    """Return start and size of parts of at least `least`, or smaller ones if `most` is less."""
    count = max(-(-total // most), total // least, 1)
    starts = [total * part // count for part in range(count + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(starts)]


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What one call needs: a row for each query of a chunk's heads, with a column for each key."""

    chunks: list[Chunk]
    score_row: int  # columns of a row: whole tiles, so that loads and stores need no mask
    elements: int
    heads_per_program: int  # of the keys' kernel: a whole group, or 1 to fill the device
    summed_elements: int  # of float32, if heads of a group are summed after the kernel

    def num_bytes(self, element_bytes: int) -> int:
        """Return the bytes of scores and sums."""
        return element_bytes * self.elements + 4 * self.summed_elements


def backward_workspace(
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
    chunks = lane_chunks(lanes, groups, fitting, -(-FILLING_PROGRAMS // programs))
    largest = max(chunk.lanes * chunk.groups for chunk in chunks)
    is_split = group_heads > 1 and len(chunks) == 1 and largest * programs < FILLING_PROGRAMS
    return Workspace(
        chunks=chunks,
        score_row=score_row,
        elements=largest * group_scores,
        heads_per_program=1 if is_split else group_heads,
        summed_elements=2 * lanes * keys * heads * head_width if is_split else 0,
    )
