"""Write the encoded documents of one split into shards, each recorded in the build's journal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_pipeline.builder.journal import BuildJournal, FinishedShard
from data_pipeline.builder.records import Document
from data_pipeline.config import CorpusConfig, ShardFormat
from data_pipeline.corpora.lengths import write_lengths
from data_pipeline.corpora.manifest import Manifest, ShardInfo
from data_pipeline.corpora.mixing import DomainOfShard
from data_pipeline.files import sha256_of
from data_pipeline.shards.shards import FORMATS, shard_name, write_index, write_shard
from data_pipeline.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """What is stored of a document."""

    id: str
    tokens: np.ndarray  # with the one that ends it
    text_bytes: int  # UTF-8
    characters: int
    domain: str
    location: str = ""  # in the input: file, or file:record


class DocumentEncoder:
    """Makes an EncodedDocument of a document and the ids of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, document: Document, ids: np.ndarray, domain: str) -> EncodedDocument:
        tokens = np.append(ids, np.array(self._tokenizer.end_id, ids.dtype))
        if document.tokens is None:
            text = document.text + self._tokenizer.end_text
            text_bytes, characters = len(text.encode()), len(text)
        else:
            bytes_V, characters_V = self._text_sizes
            text_bytes, characters = int(bytes_V[tokens].sum()), int(characters_V[tokens].sum())
        return EncodedDocument(document.id, tokens, text_bytes, characters, domain, document.source)

    @cached_property
    def _text_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        return self._tokenizer.text_sizes()


class ShardFiles(Protocol):
    """The kind of files that a split is written to."""

    limit: int  # bytes of a shard of more than one document
    has_lengths: bool  # whether each has a file of its documents' lengths beside it

    def name(self, number: int) -> str:
        """Return the name of shard `number`."""
        ...

    def size_of(self, document: EncodedDocument) -> int:
        """Return how many bytes of the limit the document takes up."""
        ...

    def write(
        self, path: Path, documents: Sequence[EncodedDocument], scratch: Path
    ) -> dict[str, Any]:
        """Write a shard atomically, see `write_shard`."""
        ...


class CorpusShards:
    """Shards of a corpus, in the order of their documents."""

    def __init__(self, config: CorpusConfig) -> None:
        self.limit, self.has_lengths = config.shard_bytes, True
        self._format: ShardFormat = config.shard_format

    def name(self, number: int) -> str:
        return shard_name(number, self._format)

    def size_of(self, document: EncodedDocument) -> int:
        return FORMATS[self._format].sample_bytes(document.id, document.tokens.nbytes)

    def write(
        self, path: Path, documents: Sequence[EncodedDocument], scratch: Path
    ) -> dict[str, Any]:
        return write_shard(path, [(each.id, each.tokens) for each in documents], scratch)


class SplitWriter:
    """Fills shards up to the limit of `files`, or with one document, in the documents' order."""

    def __init__(
        self, split: str, files: ShardFiles, tokenizer: Tokenizer, journal: BuildJournal
    ) -> None:
        self.split = split
        self._files = files
        self._tokenizer = tokenizer
        self._journal = journal
        self._directory = journal.output / split
        self._directory.mkdir(exist_ok=True)
        self.shards = [shard for shard in journal.shards if shard.split == split]
        self._documents_to_skip = sum(shard.info.documents for shard in self.shards)
        self._start_shard()

    def skip(self) -> bool:
        """Count the split's next document; whether a shard from before a restart holds it."""
        self._documents_to_skip -= 1
        return self._documents_to_skip >= 0

    def skip_all(self, count: int) -> bool:
        """Whether shards from before a restart hold the next `count` documents; then count them."""
        if count > self._documents_to_skip:
            return False
        self._documents_to_skip -= count
        return True

    def _start_shard(self) -> None:
        self._pending: list[EncodedDocument] = []
        self._bytes = 0

    def add(self, document: EncodedDocument) -> None:
        """Add a document; writes a shard first if it does not fit into the current one."""
        size = self._files.size_of(document)
        if self._pending and self._bytes + size > self._files.limit:
            self.flush()
        self._pending.append(document)
        self._bytes += size

    def flush(self) -> None:
        """Write the pending documents as a shard."""
        if not self._pending:
            return
        path = self._directory / self._files.name(len(self.shards))
        entry = self._files.write(path, self._pending, self._journal.directory / "scratch")
        lengths = [len(each.tokens) for each in self._pending]
        domains: defaultdict[str, DomainOfShard] = defaultdict(DomainOfShard)
        for each, length in zip(self._pending, lengths, strict=True):
            domains[each.domain].add(length)
        sha256 = sha256_of(path)
        info = ShardInfo(
            path=path.name,
            documents=len(lengths),
            tokens=sum(lengths),
            longest_document=max(lengths),
            size=path.stat().st_size,
            sha256=sha256,
            text_bytes=sum(each.text_bytes for each in self._pending),
            characters=sum(each.characters for each in self._pending),
            lengths=write_lengths(path, sha256, lengths) if self._files.has_lengths else "",
        )
        shard = FinishedShard(self.split, info, entry, dict(domains))
        self._journal.record(shard)
        self.shards.append(shard)
        self._start_shard()

    def finish(self) -> None:
        """Write the index, then the manifest, which marks the split as complete."""
        write_index(self._directory, [shard.index_entry for shard in self.shards])
        manifest = Manifest(
            dtype=self._tokenizer.dtype,
            tokenizer=self._tokenizer.fingerprint,
            end_id=self._tokenizer.end_id,
            vocab_size=self._tokenizer.vocab_size,
            shards=tuple(shard.info for shard in self.shards),
        )
        manifest.write(self._directory)
