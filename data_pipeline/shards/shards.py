"""Shards of tokens as MDS (`.mds`) or WebDataset (`.tar`), each written by its stock writer.

Both are read by memory map. A document's tokens are stored uncompressed and contiguous, so any part
of them is an array that views the file.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.config import ShardFormat
from data_pipeline.shards import mds, wds
from data_pipeline.shards.mds import InvalidShard
from foundation.errors import DataError
from foundation.paths import path_text

# Modules with the same functions: SUFFIX, sample_bytes, write_shard, read_layout.
FORMATS: dict[ShardFormat, ModuleType] = {"mds": mds, "webdataset": wds}


def shard_name(number: int, shard_format: ShardFormat) -> str:
    """Return the name of a split's shard number `number`."""
    return f"shard.{number:05d}{FORMATS[shard_format].SUFFIX}"


def write_shard(
    path: Path, documents: Sequence[tuple[str, np.ndarray]], scratch: Path
) -> dict[str, Any]:
    """Write (id, tokens) pairs as a shard, atomically, in the format of the name's suffix.

    Returns its entry for `write_index`. `scratch` is a directory on the same file system that this
    call may empty.
    """
    return _format_of(path).write_shard(path, documents, scratch)


def write_index(directory: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the index that stock readers find the shards by, in formats that have one."""
    if all(entries):
        mds.write_index(directory, entries)


def read_index(directory: Path, num_shards: int) -> list[dict[str, Any]]:
    """Return the entries that `write_index` was given."""
    return mds.read_index(directory) or [{}] * num_shards


def renamed(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the index entry of a shard under another name."""
    return mds.renamed(entry, name) if entry else {}


class ShardReader:
    """One shard, memory-mapped. Opening it reads the header of every document, but no tokens.

    Raises DataError with the file's name if it is missing, truncated, or contradicts its headers.
    """

    def __init__(self, path: Path, dtype: str, file: BinaryIO | None = None) -> None:
        """`file`: the opened shard; the map duplicates its descriptor, and so keeps its lock."""
        self.path = path
        self.itemsize = np.dtype(dtype).itemsize
        self._dtype = dtype
        try:
            with file or open(path, "rb") as opened:
                self._memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise DataError(
                f"shard {path} is missing; restore it or build the corpus again"
            ) from None
        except ValueError:
            raise DataError(
                f"shard {path} is empty; restore it or build the corpus again"
            ) from None
        self.view = memoryview(self._memory)
        try:
            layout = _format_of(path).read_layout(self._memory, dtype)
        except InvalidShard as error:
            raise self._corrupted(error) from None
        self.token_offsets = layout.token_offsets
        self.lengths = layout.lengths  # tokens of each document
        self._layout = layout

    def document_id(self, document: int) -> str:
        """Return the id of one document; DataError if it cannot be read."""
        try:
            return self._layout.document_id(document)
        except (InvalidShard, ValueError) as error:
            raise self._corrupted(error) from None

    def _corrupted(self, error: Exception) -> DataError:
        return DataError(
            f"shard {path_text(self.path)} is corrupted: {error}; "
            "restore it or build the corpus again"
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, offset: int = 0, count: int | None = None) -> np.ndarray:
        """Return `count` tokens of one document from `offset` on, without a copy."""
        count = int(self.lengths[document]) - offset if count is None else count
        start = int(self.token_offsets[document]) + offset * self.itemsize
        return np.frombuffer(self._memory, self._dtype, count, start)


def _format_of(path: Path) -> ModuleType:
    for shard_format in FORMATS.values():
        if path.suffix == shard_format.SUFFIX:
            return shard_format
    expected = " or ".join(shard_format.SUFFIX for shard_format in FORMATS.values())
    raise DataError(
        f"shard {path} has an unknown format, expected a name that ends in {expected}; "
        "use the version that wrote it"
    )
