"""Shards of tokens in either format: MDS (`.mds`) or WebDataset (`.tar`), each written by its stock writer.

Both are read by memory map: a document's tokens lie in the file as they are, so a lane's piece is one copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.location import shown
from data_pipeline.shards import mds, wds
from data_pipeline.shards.shard_layout import ShardDamage, ShardLayout

ShardFormat = Literal["mds", "webdataset"]


@dataclass(frozen=True)
class _Format:
    suffix: str
    sample_bytes: Callable[
        [str, int], int
    ]  # that a document takes up, of its id and the bytes of its tokens
    write: Callable[[Path, Sequence[tuple[str, np.ndarray]], Path], dict[str, Any]]
    layout: Callable[[mmap.mmap, str], ShardLayout]


FORMATS = {
    "mds": _Format(".mds", mds.sample_bytes, mds.write_shard, mds.read_layout),
    "webdataset": _Format(".tar", wds.sample_bytes, wds.write_shard, wds.read_layout),
}


def shard_name(number: int, shard_format: ShardFormat) -> str:
    """The name of a split's shard number `number`."""
    return f"shard.{number:05d}{FORMATS[shard_format].suffix}"


def write_shard(
    path: Path, documents: Sequence[tuple[str, np.ndarray]], scratch: Path
) -> dict[str, Any]:
    """Write (id, tokens) pairs as a shard of the format that the name says, whole at `path` or not at all.

    What comes back is its entry for `write_index`. `scratch` is a directory on the same file system that this call may
    empty.
    """
    return _format_of(path).write(path, documents, scratch)


def write_index(directory: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the index by which stock readers find the shards, in formats that have one."""
    if all(entries):
        mds.write_index(directory, entries)


def read_index(directory: Path, num_shards: int) -> list[dict[str, Any]]:
    """The entries that `write_index` was given."""
    return mds.read_index(directory) or [{}] * num_shards


def renamed(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """The index entry of a shard that has another name now."""
    return mds.renamed(entry, name) if entry else {}


class ShardReader:
    """One shard by memory map; opening it reads the header of every document, but no tokens.

    Raises DataError, which names the file, when it is absent, truncated, or not what its headers say.
    """

    def __init__(self, path: Path, dtype: str, file: BinaryIO | None = None) -> None:
        """`file` is the shard already opened; a lock that was taken through it lasts as long as the reader does."""
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
            layout = _format_of(path).layout(self._memory, dtype)
        except ShardDamage as damage:
            raise DataError(
                f"shard {shown(path)} is damaged: {damage}; restore it or build the corpus again"
            ) from None
        self.token_begins = layout.token_begins
        self.lengths = layout.lengths  # tokens of each document
        self.document_id = layout.document_id

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, offset: int = 0, count: int | None = None) -> np.ndarray:
        """Tokens of one document, without a copy."""
        count = int(self.lengths[document]) - offset if count is None else count
        begin = int(self.token_begins[document]) + offset * self.itemsize
        return np.frombuffer(self._memory, self._dtype, count, begin)


def _format_of(path: Path) -> _Format:
    for shard_format in FORMATS.values():
        if path.suffix == shard_format.suffix:
            return shard_format
    expected = " or ".join(shard_format.suffix for shard_format in FORMATS.values())
    raise DataError(
        f"shard {path} has an unknown format, expected a name in {expected}; use a version that wrote it"
    )
