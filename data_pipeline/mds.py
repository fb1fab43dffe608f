"""MDS shards: written by mosaicml-streaming's own writer, read by memory map. The only module that imports streaming.

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

from data_pipeline.errors import DataError
from data_pipeline.files import fsync_directory, fsync_file, naming, write_json

INDEX_NAME = "index.json"  # what StreamingDataset looks for
SAMPLE_HEAD_BYTES = 8  # the sizes of id and tokens
LARGEST_SAMPLE_OVERHEAD = 4 + SAMPLE_HEAD_BYTES + 9


def write_shard(path: Path, documents: Sequence[tuple[str, np.ndarray]], scratch: Path) -> dict[str, Any]:
    """Write (id, tokens) pairs as one shard that is at `path` whole or not at all; its entry for the index comes back.

    `scratch` is a directory on the same file system that this call may empty.
    """
    from streaming import MDSWriter

    shutil.rmtree(scratch, ignore_errors=True)
    columns = {"id": "str", "tokens": f"ndarray:{documents[0][1].dtype}"}
    with naming(path):
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
    entry["raw_data"]["basename"] = path.name
    return entry


def write_index(directory: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the index by which stock readers find the shards."""
    write_json(directory / INDEX_NAME, {"version": 2, "shards": list(entries)})


class ShardReader:
    """One shard by memory map; opening it reads the header of every document, but no tokens.

    Raises DataError, which names the file, when it is absent, truncated, or not what its header says.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.itemsize = np.dtype(dtype).itemsize
        self._dtype = dtype
        try:
            with open(path, "rb") as file:
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise DataError(f"shard {path} is missing; restore it or build the corpus again") from None
        except ValueError:
            raise DataError(f"shard {path} is empty; restore it or build the corpus again") from None
        self.view = memoryview(self.memory)
        raw = np.frombuffer(self.memory, np.uint8)
        self._begins = self._read_begins(raw)
        self._locate_documents(raw)

    def _read_begins(self, raw: np.ndarray) -> np.ndarray:
        """Byte offset of each sample, and of the end of the last."""
        if len(raw) < 8:
            raise self._damaged("it is too short for a header")
        num_documents = int.from_bytes(self.memory[:4], "little")
        end_of_table = 8 + 4 * num_documents
        if not num_documents or end_of_table > len(raw):
            raise self._damaged(f"its header promises {num_documents} documents")
        begins = np.frombuffer(self.memory, "<u4", num_documents + 1, 4).astype(np.int64)
        if begins[0] < end_of_table or begins[-1] != len(raw) or (np.diff(begins) <= SAMPLE_HEAD_BYTES).any():
            raise self._damaged(f"it has {len(raw)} bytes and its header promises {begins[-1]}")
        try:
            config = json.loads(self.memory[end_of_table : int(begins[0])])
            columns = dict(zip(config["column_names"], config["column_encodings"], strict=True))
        except (ValueError, KeyError, TypeError):
            raise self._damaged("its column description cannot be read") from None
        if columns != {"id": "str", "tokens": f"ndarray:{self._dtype}"}:
            raise self._damaged(f"it has the columns {columns}, expected id and tokens of type {self._dtype}")
        return begins

    def _locate_documents(self, raw: np.ndarray) -> None:
        begins, ends = self._begins[:-1], self._begins[1:]
        heads = raw[begins[:, None] + np.arange(SAMPLE_HEAD_BYTES)].view("<u4").astype(np.int64)
        id_sizes, token_sizes = heads[:, 0], heads[:, 1]
        if (begins + SAMPLE_HEAD_BYTES + id_sizes + token_sizes != ends).any() or (token_sizes < 2).any():
            raise self._damaged("the sizes in its documents' headers do not add up")
        shape_begins = begins + SAMPLE_HEAD_BYTES + id_sizes
        shape_codes = raw[shape_begins]
        if ((shape_codes >> 2) != 1).any():
            raise self._damaged("its token arrays are not one-dimensional")
        shape_bytes = 1 + (1 << (shape_codes & 3).astype(np.int64))
        value_bytes = token_sizes - shape_bytes
        if (value_bytes <= 0).any() or (value_bytes % self.itemsize).any():
            raise self._damaged("the sizes of its token arrays are impossible")
        self.lengths = value_bytes // self.itemsize  # tokens of each document
        self.token_begins = shape_begins + shape_bytes  # bytes

    def _damaged(self, reason: str) -> DataError:
        return DataError(f"shard {self.path} is damaged: {reason}; restore it or build the corpus again")

    def __len__(self) -> int:
        return len(self.lengths)

    def document_id(self, document: int) -> str:
        begin = int(self._begins[document])
        size = int.from_bytes(self.memory[begin : begin + 4], "little")
        return self.memory[begin + SAMPLE_HEAD_BYTES : begin + SAMPLE_HEAD_BYTES + size].decode(errors="replace")

    def tokens(self, document: int, offset: int = 0, count: int | None = None) -> np.ndarray:
        """Tokens of one document, without a copy."""
        count = int(self.lengths[document]) - offset if count is None else count
        begin = int(self.token_begins[document]) + offset * self.itemsize
        return np.frombuffer(self.memory, self._dtype, count, begin)
