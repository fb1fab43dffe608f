"""The tiles that a search on a GPU found to be the fastest, in a table beside the kernels.

`make gpu` searches and writes the table, for the device it runs on; whoever wants these tiles
copies it to `TABLE`. Other tiles round differently, so a run records which table it used. Format:
{"format": 1, "kernels": version, "tiles": [row, ...], "tried": [row, ...]}, with a row such as
{"capability": [9, 0], "head_width": 128, "kernel": "forward", "rows": 64, "columns": 32,
"warps": 4, "stages": 2, "seconds": 0.0012}. `kernel` is a field of `Tiles`, and the tiles of a head
width serve all multiples of 8 that are padded to the same one. Torch-free.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import fields, replace
from pathlib import Path

from data_pipeline.checked_fields import Fields, InvalidField
from data_pipeline.errors import ConfigError
from data_pipeline.files import read_json, sha256_of
from pretrain.kernels.triton.tiling import Tile, Tiles, built_in_tiles, is_aligned, tiled_width

TABLE = Path(__file__).with_name("tiles.json")
FORMAT = 1
KERNELS = tuple(field.name for field in fields(Tiles))
LARGEST_SIZE, LARGEST_WARPS, MOST_STAGES = 256, 16, 8
_SOURCES = ("backward_keys", "backward_positions", "backward_queries", "forward", "tiles")


def tiles_for(head_width: int, capability: tuple[int, int]) -> Tiles:
    """Return the tiles for a head width and compute capability.

    ConfigError if there is a table that does not fit the device or these kernels.
    """
    return _read_once(TABLE, head_width, capability)


def table_name() -> str:
    """Return what identifies the tiles in use: a table's hash, or that they are built in."""
    return sha256_of(TABLE)[:12] if TABLE.exists() else "built in"


@functools.cache
def kernels_version() -> str:
    """Return a hash of the kernels' source, which decides what is fastest."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


def tiles_in(path: Path, head_width: int, capability: tuple[int, int]) -> Tiles:
    """Return the tiles of the table at `path`, and built-in ones for what it does not have.

    ConfigError if it does not fit the device or these kernels.
    """
    configured = built_in_tiles(head_width, capability)
    if not path.exists():
        return configured
    try:
        found = _checked(Fields(read_json(path), "the table"), tiled_width(head_width), capability)
        return replace(configured, **found) if is_aligned(head_width) else configured
    except (OSError, ValueError, InvalidField) as error:
        raise ConfigError(
            f"{path} cannot be used: {error}; remove it, or search again on this "
            "device (make gpu STEPS=tiles) and copy the new table there"
        ) from None


_read_once = functools.cache(tiles_in)  # asked by every layer of every step


def _checked(table: Fields, width: int, capability: tuple[int, int]) -> dict[str, Tile]:
    """Return the tiles by kernel that the table has for the width; InvalidField if none fit."""
    table.integer("format", FORMAT, FORMAT)
    if (version := table.text("kernels")) != kernels_version():
        raise InvalidField(f"it is for kernels {version}, these are {kernels_version()}")
    found: dict[str, Tile] = {}
    capabilities = set()
    for row in table.items("tiles"):
        kernel, its_capability = row.choice("kernel", KERNELS), tuple(row.integers("capability"))
        tile = Tile(
            row.integer("rows", 16, LARGEST_SIZE),
            row.integer("columns", 16, LARGEST_SIZE),
            row.integer("warps", 1, LARGEST_WARPS),
            row.integer("stages", 1, MOST_STAGES),
        )
        capabilities.add(its_capability)
        if its_capability == capability and tiled_width(row.integer("head_width", 1)) == width:
            if kernel in found:
                raise InvalidField(f"it has two tiles of {kernel} for heads of {width}")
            found[kernel] = tile
    if capability not in capabilities:
        known = ", ".join(".".join(map(str, each)) for each in sorted(capabilities)) or "no device"
        raise InvalidField(
            f"it is for compute capability {known}, found {capability[0]}.{capability[1]}"
        )
    return found
