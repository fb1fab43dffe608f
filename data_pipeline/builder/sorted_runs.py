"""Sorted runs: files that a build which shuffles writes first, and then reads by ranges of keys.

The key of a document is a hash of the seed, its location in the input, and its id; in a split that
keeps its order all keys are 0. A run has the documents of a stretch of the input in the order of
their keys, so the documents of any range of keys are one slice of each run. Runs exist only during
a build, in the directories of its parts.

Layout (little endian): 8 bytes with the size of the head; the head, JSON with the counts and the
type of the tokens; a column for each of FIELDS, 8 bytes per document; the tokens; the ids in UTF-8.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.builder.split_writer import EncodedDocument
from data_pipeline.config import CorpusConfig
from data_pipeline.corpora.manifest import ShardInfo
from foundation.errors import DataError
from foundation.files import atomic_write, named_errors
from foundation.typed_values import json_text, parse_json

FIELDS = ("keys", "token_ends", "id_ends", "text_bytes", "characters")
DOCUMENT_BYTES = 512  # host memory of a document beside its tokens: its id, objects of Python
NUM_KEYS = 1 << 64  # keys are below it


def shuffle_key(seed: int, document: EncodedDocument) -> int:
    """Return the place of a document in the shuffled order: 64 bits."""
    text = f"{seed} {document.location}\0{document.id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class SortedRuns:
    """The files of a split in a build that shuffles, see ShardFiles in split_writer.py."""

    def __init__(self, config: CorpusConfig, keeps_order: bool = False) -> None:
        self.limit = config.shuffle_bytes
        self._seed = config.shuffle_seed
        self._keeps_order = keeps_order

    def name(self, number: int) -> str:
        return f"{number:05d}.run"

    def size_of(self, document: EncodedDocument) -> int:
        return document.tokens.nbytes + DOCUMENT_BYTES

    def write(
        self, path: Path, documents: Sequence[EncodedDocument], scratch: Path
    ) -> dict[str, Any]:
        keys = np.zeros(len(documents), "<u8")
        if not self._keeps_order:
            keys[:] = [shuffle_key(self._seed, document) for document in documents]
        # Stable: documents with equal keys keep the input's order, however runs divide the input.
        order = np.argsort(keys, kind="stable")
        _write_run(path, keys[order], [documents[index] for index in order.tolist()])
        return {}


def _write_run(path: Path, keys: np.ndarray, documents: Sequence[EncodedDocument]) -> None:
    ids = [document.id.encode() for document in documents]
    columns = {
        "keys": keys,
        "token_ends": list(accumulate(len(document.tokens) for document in documents)),
        "id_ends": list(accumulate(map(len, ids))),
        "text_bytes": [document.text_bytes for document in documents],
        "characters": [document.characters for document in documents],
    }
    head = {
        "documents": len(documents),
        "tokens": columns["token_ends"][-1],
        "dtype": documents[0].tokens.dtype.str,
    }
    content = json_text(head).encode()
    content += b" " * (-len(content) % 8)  # numpy reads aligned columns faster
    with atomic_write(path) as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name in FIELDS:
            file.write(np.asarray(columns[name], "<u8").tobytes())
        for document in documents:
            file.write(document.tokens.tobytes())
        file.write(b"".join(ids))


class Run:
    """A run on disk; DataError unless it has the size that was written."""

    def __init__(self, directory: Path, info: ShardInfo) -> None:
        self._path = directory / info.path
        with open(self._path, "rb") as file:
            head_bytes = int.from_bytes(file.read(8), "little")
            try:
                self._head = parse_json(file.read(min(head_bytes, info.size)))
            except ValueError:
                self._head = {}
            size = os.fstat(file.fileno()).st_size
        if not self._head or size != info.size:
            raise DataError(
                f"{self._path} is corrupted: it has {size} bytes, expected {info.size}; remove "
                f"{directory.parent} and build again"
            )
        self._start = 8 + head_bytes

    def between(self, first: int, end: int) -> tuple[np.ndarray, Documents]:
        """Return the keys from `first` to before `end`, uint64 [D] in order, and their documents.

        The documents are in host memory: nothing keeps the file open.
        """
        memory = np.memmap(self._path, np.uint8, "r")
        count, dtype = self._head["documents"], np.dtype(self._head["dtype"])
        tokens_start = self._start + 8 * len(FIELDS) * count
        ids_start = tokens_start + dtype.itemsize * self._head["tokens"]
        columns = memory[self._start : tokens_start].view("<u8").reshape(len(FIELDS), count)
        low, high = (first_at(columns[0], key) for key in (first, end))
        token_ends, id_ends = columns[1], columns[2]
        token_bounds, id_bounds = (
            (int(ends[low - 1]) if low else 0, int(ends[high - 1]) if high else 0)
            for ends in (token_ends, id_ends)
        )
        # Read, not mapped: pages of a map count as host memory of this process, too.
        with named_errors(self._path), open(self._path, "rb") as file:
            file.seek(tokens_start + dtype.itemsize * token_bounds[0])
            tokens = np.fromfile(file, dtype, token_bounds[1] - token_bounds[0])
            file.seek(ids_start + id_bounds[0])
            ids = file.read(id_bounds[1] - id_bounds[0])
        rows = np.array(columns[:, low:high])
        rows[1] -= np.uint64(token_bounds[0])
        rows[2] -= np.uint64(id_bounds[0])
        return rows[0], Documents(rows, tokens, ids)

    def count(self, first: int, end: int) -> int:
        """Return how many documents have keys from `first` to before `end`."""
        keys = np.memmap(self._path, "<u8", "r", self._start, (self._head["documents"],))
        return first_at(keys, end) - first_at(keys, first)


class Documents:
    """Documents of a run, made when they are asked for."""

    def __init__(self, columns: np.ndarray, tokens: np.ndarray, ids: bytes) -> None:
        self._columns, self._tokens, self._ids = columns, tokens, ids

    def __getitem__(self, index: int) -> EncodedDocument:
        _, token_end, id_end, text_bytes, characters = self._columns[:, index].tolist()
        token_start, id_start = self._columns[1:3, index - 1].tolist() if index else (0, 0)
        return EncodedDocument(
            self._ids[id_start:id_end].decode(),
            self._tokens[token_start:token_end],
            text_bytes,
            characters,
        )


def first_at(keys: np.ndarray, key: int) -> int:
    """Return the index of the first of the sorted `keys` that is at least `key`."""
    return len(keys) if key >= NUM_KEYS else int(np.searchsorted(keys, np.uint64(key)))
