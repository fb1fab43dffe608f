"""Copies of a text in several parts of a build: each part lists its hashes, then hears which of them came before it.

After that a part drops the same documents as a build by one process would. P parts, N hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.builder.document_rules import HASH_BYTES, hash_of
from data_pipeline.builder.documents import read_documents
from data_pipeline.builder.records import Document
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import CorpusConfig
from data_pipeline.files import atomic_write


def write_hashes(path: Path, sources: Iterable[SourceFile], config: CorpusConfig) -> None:
    """List the hash of every text in these files, each once."""
    documents = (document for source in sources for document in read_documents(source, config))
    hashes = {hash_of(document.text) for document in documents if isinstance(document, Document)}
    with atomic_write(path) as file:
        file.write(b"".join(sorted(hashes)))


def write_copies(hashes: Sequence[Path], copies: Sequence[Path]) -> None:
    """For each part in their order, list in `copies` those of its `hashes` that a part before it has, too."""
    lists = [np.fromfile(path, "<u8").reshape(-1, 2) for path in hashes]
    hashes_N2 = np.concatenate(lists)
    parts_N = np.repeat(np.arange(len(lists)), [len(rows) for rows in lists])
    order_N = np.lexsort(
        (parts_N, hashes_N2[:, 1], hashes_N2[:, 0])
    )  # equal ones together, the first part's in front
    repeats = (hashes_N2[order_N[1:]] == hashes_N2[order_N[:-1]]).all(1)
    later = order_N[1:][repeats]
    for part, path in enumerate(copies):
        with atomic_write(path) as file:
            file.write(hashes_N2[later[parts_N[later] == part]].tobytes())


def read_hashes(path: Path) -> set[bytes]:
    """The hashes that are listed there."""
    content = path.read_bytes()
    return {content[begin : begin + HASH_BYTES] for begin in range(0, len(content), HASH_BYTES)}
