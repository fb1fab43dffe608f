"""The built-in tiles of the fused kernels, by compute capability and head width. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace


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


_ALIGNED_WIDTH = 8  # whose multiples are rows of 16 bytes; loads of others take more registers
_UNALIGNED_FORWARD, _UNALIGNED_KEYS = Tile(64, 32, 4, 1), Tile(16, 64, 4, 1)


def built_in_tiles(head_width: int, capability: tuple[int, int]) -> Tiles:
    """Return the tiles for a head width and compute capability; newer GPUs use the tiles of 9."""
    tiles = _TILES[min(capability[0], 9), tiled_width(head_width)]
    if is_aligned(head_width):
        return tiles
    tiles = replace(tiles, forward=_UNALIGNED_FORWARD)
    # Wide heads of an even width are loaded in words, which leaves registers for the usual tile.
    is_wide_and_even = head_width > 64 and head_width % 2 == 0
    return tiles if is_wide_and_even else replace(tiles, key_gradient=_UNALIGNED_KEYS)


def is_aligned(head_width: int) -> bool:
    """Whether loads of 16 bytes fit into the rows of a head, so that a table's tiles serve it."""
    return head_width % _ALIGNED_WIDTH == 0


def tiled_width(head_width: int) -> int:
    """Return the head width whose tiles serve this one."""
    return 64 if head_width <= 64 else 128
