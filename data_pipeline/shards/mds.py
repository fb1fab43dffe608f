"""MDS shards: written by mosaicml-streaming's own writer, read by memory map.

Layout of a shard (little endian): uint32 number of samples; uint32 offset of each sample and of the
end of the last; JSON with the columns; the samples. A sample: uint32 size of each column in the
order of the names (id, tokens); the id in UTF-8; the tokens. The tokens: one byte
`number of dimensions << 2 | log2(bytes per dimension)`, the dimensions, the values.
"""

import mmap
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foundation.files import (
    LARGEST_LIST_BYTES,
    fsync_file,
    move,
    named_errors,
    read_json,
    write_json,
)
from foundation.typed_values import parse_json

SUFFIX = ".mds"
Buffer = bytes | memoryview | mmap.mmap
INDEX_NAME = "index.json"  # what StreamingDataset looks for
SAMPLE_HEAD_BYTES = 8  # the sizes of id and tokens
LARGEST_SHAPE_BYTES = 9  # the first byte of the tokens, and their one dimension


class InvalidShard(Exception):
    """A shard's headers contradict its size or each other; the message says how."""


@dataclass(frozen=True)
class ShardLayout:
    """Where the D documents of a shard are, in order, for MDS and WebDataset alike."""

    token_offsets: np.ndarray  # int64 [D], bytes from the start of the file
    lengths: np.ndarray  # int64 [D], tokens
    document_id: Callable[[int], str]


def sample_bytes(document_id: str, token_bytes: int) -> int:
    """Return how many bytes of a shard a document takes up, at most."""
    return 4 + SAMPLE_HEAD_BYTES + LARGEST_SHAPE_BYTES + len(document_id.encode()) + token_bytes


def write_shard(
    path: Path, documents: Sequence[tuple[str, np.ndarray]], scratch: Path
) -> dict[str, Any]:
    """Write (id, tokens) pairs as one shard, atomically; return its entry for the index.

    `scratch` is a directory on the same file system that this call may empty.
    """
    from streaming import MDSWriter

    shutil.rmtree(scratch, ignore_errors=True)
    columns = {"id": "str", "tokens": f"ndarray:{documents[0][1].dtype}"}
    with named_errors(path):
        writer = MDSWriter(out=str(scratch), columns=columns, hashes=["xxh64"], size_limit=None)
        for document_id, tokens in documents:
            writer.write({"id": document_id, "tokens": tokens})
        # Not as a context manager: that would write an index even after an exception.
        writer.finish()
        (entry,) = read_json(scratch / INDEX_NAME)["shards"]
        written = scratch / entry["raw_data"]["basename"]
        fsync_file(written)
        move(written, path)
    shutil.rmtree(scratch)
    return renamed(entry, path.name)


def write_index(directory: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the index that stock readers find the shards by."""
    write_json(directory / INDEX_NAME, {"version": 2, "shards": list(entries)})


def read_index(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of the index in `directory`; none if there is no index."""
    path = directory / INDEX_NAME
    return read_json(path, LARGEST_LIST_BYTES)["shards"] if path.exists() else []


def renamed(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the entry of a shard under another name."""
    return {**entry, "raw_data": {**entry["raw_data"], "basename": name}}


def read_layout(memory: mmap.mmap, dtype: str) -> ShardLayout:
    """Find every document by its headers alone; InvalidShard if they do not fit the file."""
    raw = np.frombuffer(memory, np.uint8)
    sample_offsets = _sample_offsets(memory, dtype)
    token_offsets, lengths = _locate_tokens(raw, sample_offsets, np.dtype(dtype).itemsize)

    def document_id(document: int) -> str:
        start = int(sample_offsets[document])
        size = int.from_bytes(memory[start : start + 4], "little")
        start += SAMPLE_HEAD_BYTES
        return memory[start : start + size].decode(errors="replace")

    return ShardLayout(token_offsets, lengths, document_id)


def _sample_offsets(memory: mmap.mmap, dtype: str) -> np.ndarray:
    """Return the byte offset of each sample, and of the end of the last: int64 [D + 1]."""
    offsets, columns = read_head(memory)
    if len(offsets) == 1 or (np.diff(offsets) <= SAMPLE_HEAD_BYTES).any():
        raise InvalidShard(f"its header lists {len(offsets) - 1} documents, some without tokens")
    encodings = {column.name: column.encoding for column in columns}
    if encodings != {"id": "str", "tokens": f"ndarray:{dtype}"}:
        raise InvalidShard(
            f"it has the columns {encodings}, expected id and tokens of type {dtype}"
        )
    return offsets


@dataclass(frozen=True)
class Column:
    """A column of an MDS shard, ours or another's: how it is encoded, in how many bytes."""

    name: str
    encoding: str
    size: int | None  # None: each sample states its own


def read_head(memory: Buffer) -> tuple[np.ndarray, list[Column]]:
    """Return the offsets of S samples and of the end of the last, int64 [S + 1], and the columns.

    InvalidShard if they do not fit the file.
    """
    if len(memory) < 8:
        raise InvalidShard("it is too short for a header")
    num_samples = int.from_bytes(memory[:4], "little")
    end_of_table = 8 + 4 * num_samples
    if end_of_table > len(memory):
        raise InvalidShard(f"its header lists {num_samples} samples")
    offsets = np.frombuffer(memory, "<u4", num_samples + 1, 4).astype(np.int64)
    is_ordered = offsets[0] >= end_of_table and (np.diff(offsets) >= 0).all()
    if not is_ordered or offsets[-1] != len(memory):
        raise InvalidShard(f"it has {len(memory)} bytes, its header expects {offsets[-1]} bytes")
    try:
        head = parse_json(bytes(memory[end_of_table : int(offsets[0])]))
        listed = (head["column_names"], head["column_encodings"], head["column_sizes"])
        columns = [
            Column(str(name), str(encoding), None if size is None else int(size))
            for name, encoding, size in zip(*listed, strict=True)
        ]
    except (ValueError, KeyError, TypeError, OverflowError):
        raise InvalidShard("its column description cannot be read") from None
    if any(column.size is not None and column.size < 0 for column in columns):
        raise InvalidShard("its column description has a negative size")
    return offsets, columns


def _locate_tokens(
    raw: np.ndarray, sample_offsets: np.ndarray, itemsize: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte offset of each document's tokens, and how many tokens it has."""
    starts, ends = sample_offsets[:-1], sample_offsets[1:]
    heads = raw[starts[:, None] + np.arange(SAMPLE_HEAD_BYTES)].view("<u4").astype(np.int64)
    id_sizes, token_sizes = heads[:, 0], heads[:, 1]
    shape_offsets = starts + SAMPLE_HEAD_BYTES + id_sizes
    if (shape_offsets + token_sizes != ends).any() or (token_sizes < 2).any():
        raise InvalidShard("the sizes in its documents' headers do not add up")
    shape_codes = raw[shape_offsets]
    if ((shape_codes >> 2) != 1).any():
        raise InvalidShard("its token arrays are not one-dimensional")
    shape_bytes = 1 + (1 << (shape_codes & 3).astype(np.int64))
    value_bytes = token_sizes - shape_bytes
    if (value_bytes <= 0).any() or (value_bytes % itemsize).any():
        raise InvalidShard("the sizes of its token arrays are impossible")
    return shape_offsets + shape_bytes, value_bytes // itemsize
