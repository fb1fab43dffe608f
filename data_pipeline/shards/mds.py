"""MDS shards: written by mosaicml-streaming's own writer, read by memory map.

Layout of a shard (little endian): uint32 number of samples, uint32 begin of each sample and end of the last, JSON with
the columns, then the samples. A sample: uint32 size of each column in the order of the names (id, tokens), the id in
UTF-8, then the tokens: one byte `number of dimensions << 2 | log2(bytes per dimension)`, the dimensions, the values.
"""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.files import fsync_directory, fsync_file, named_errors, write_json
from data_pipeline.shards.shard_layout import ShardDamage, ShardLayout

INDEX_NAME = "index.json"  # what StreamingDataset looks for
SAMPLE_HEAD_BYTES = 8  # the sizes of id and tokens
LARGEST_SHAPE_BYTES = 9


def sample_bytes(document_id: str, token_bytes: int) -> int:
    """How much of a shard a document takes up, at most."""
    return 4 + SAMPLE_HEAD_BYTES + LARGEST_SHAPE_BYTES + len(document_id.encode()) + token_bytes


def write_shard(
    path: Path, documents: Sequence[tuple[str, np.ndarray]], scratch: Path
) -> dict[str, Any]:
    """Write (id, tokens) pairs as one shard that is at `path` whole or not at all; its entry for the index comes back.

    `scratch` is a directory on the same file system that this call may empty.
    """
    from streaming import MDSWriter

    shutil.rmtree(scratch, ignore_errors=True)
    columns = {"id": "str", "tokens": f"ndarray:{documents[0][1].dtype}"}
    with named_errors(path):
        writer = MDSWriter(out=str(scratch), columns=columns, hashes=["xxh64"], size_limit=None)
        for document_id, tokens in documents:
            writer.write({"id": document_id, "tokens": tokens})
        # Not as a context manager: that would also write an index after an exception, as if all were well.
        writer.finish()
        (entry,) = json.loads((scratch / INDEX_NAME).read_bytes())["shards"]
        written = scratch / entry["raw_data"]["basename"]
        fsync_file(written)
        written.replace(path)
    fsync_directory(path.parent)
    shutil.rmtree(scratch)
    return renamed(entry, path.name)


def write_index(directory: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the index by which stock readers find the shards."""
    write_json(directory / INDEX_NAME, {"version": 2, "shards": list(entries)})


def read_index(directory: Path) -> list[dict[str, Any]]:
    """The entries of the index in `directory`; none if there is no index."""
    path = directory / INDEX_NAME
    return json.loads(path.read_bytes())["shards"] if path.exists() else []


def renamed(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry of a shard that has another name now."""
    return {**entry, "raw_data": {**entry["raw_data"], "basename": name}}


def read_layout(memory: mmap.mmap, dtype: str) -> ShardLayout:
    """Find every document by its headers alone; ShardDamage if they do not describe the whole file."""
    raw = np.frombuffer(memory, np.uint8)
    begins = _sample_begins(memory, dtype)
    token_begins, lengths = _locate_tokens(raw, begins, np.dtype(dtype).itemsize)

    def document_id(document: int) -> str:
        begin = int(begins[document])
        size = int.from_bytes(memory[begin : begin + 4], "little")
        return memory[begin + SAMPLE_HEAD_BYTES : begin + SAMPLE_HEAD_BYTES + size].decode(
            errors="replace"
        )

    return ShardLayout(token_begins, lengths, document_id)


def _sample_begins(memory: mmap.mmap, dtype: str) -> np.ndarray:
    """Byte offset of each sample, and of the end of the last."""
    if len(memory) < 8:
        raise ShardDamage("it is too short for a header")
    num_documents = int.from_bytes(memory[:4], "little")
    end_of_table = 8 + 4 * num_documents
    if not num_documents or end_of_table > len(memory):
        raise ShardDamage(f"its header promises {num_documents} documents")
    begins = np.frombuffer(memory, "<u4", num_documents + 1, 4).astype(np.int64)
    if (
        begins[0] < end_of_table
        or begins[-1] != len(memory)
        or (np.diff(begins) <= SAMPLE_HEAD_BYTES).any()
    ):
        raise ShardDamage(f"it has {len(memory)} bytes and its header promises {begins[-1]}")
    try:
        config = json.loads(memory[end_of_table : int(begins[0])])
        columns = dict(zip(config["column_names"], config["column_encodings"], strict=True))
    except (ValueError, KeyError, TypeError):
        raise ShardDamage("its column description cannot be read") from None
    if columns != {"id": "str", "tokens": f"ndarray:{dtype}"}:
        raise ShardDamage(f"it has the columns {columns}, expected id and tokens of type {dtype}")
    return begins


def _locate_tokens(
    raw: np.ndarray, sample_begins: np.ndarray, itemsize: int
) -> tuple[np.ndarray, np.ndarray]:
    """Byte offset and number of the tokens of each document."""
    begins, ends = sample_begins[:-1], sample_begins[1:]
    heads = raw[begins[:, None] + np.arange(SAMPLE_HEAD_BYTES)].view("<u4").astype(np.int64)
    id_sizes, token_sizes = heads[:, 0], heads[:, 1]
    if (begins + SAMPLE_HEAD_BYTES + id_sizes + token_sizes != ends).any() or (
        token_sizes < 2
    ).any():
        raise ShardDamage("the sizes in its documents' headers do not add up")
    shape_begins = begins + SAMPLE_HEAD_BYTES + id_sizes
    shape_codes = raw[shape_begins]
    if ((shape_codes >> 2) != 1).any():
        raise ShardDamage("its token arrays are not one-dimensional")
    shape_bytes = 1 + (1 << (shape_codes & 3).astype(np.int64))
    value_bytes = token_sizes - shape_bytes
    if (value_bytes <= 0).any() or (value_bytes % itemsize).any():
        raise ShardDamage("the sizes of its token arrays are impossible")
    return shape_begins + shape_bytes, value_bytes // itemsize
