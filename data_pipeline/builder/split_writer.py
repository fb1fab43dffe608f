"""Write the encoded documents of one split into shards, each recorded in the build's journal."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from data_pipeline.builder.journal import BuildJournal, FinishedShard
from data_pipeline.builder.records import Document
from data_pipeline.config import CorpusConfig, ShardFormat
from data_pipeline.corpora.manifest import Manifest, ShardInfo
from data_pipeline.files import sha256_of
from data_pipeline.shards.shards import FORMATS, shard_name, write_index, write_shard
from data_pipeline.tokenizer import Tokenizer


class SplitWriter:
    """Fills shards of at most `shard_bytes`, or one document, in the order of the documents."""

    def __init__(
        self, split: str, config: CorpusConfig, tokenizer: Tokenizer, journal: BuildJournal
    ) -> None:
        self.split = split
        self._shard_bytes = config.shard_bytes
        self._shard_format: ShardFormat = config.shard_format
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

    def _start_shard(self) -> None:
        self._pending: list[tuple[str, np.ndarray]] = []
        self._bytes = self._text_bytes = self._characters = 0

    def add(self, document: Document, ids: np.ndarray) -> None:
        """Add a document; writes a shard first if it does not fit into the current one."""
        tokens = np.append(ids, np.array(self._tokenizer.end_id, ids.dtype))
        size = FORMATS[self._shard_format].sample_bytes(document.id, tokens.nbytes)
        if self._pending and self._bytes + size > self._shard_bytes:
            self.flush()
        self._pending.append((document.id, tokens))
        self._bytes += size
        if document.tokens is None:
            text = document.text + self._tokenizer.end_text
            self._text_bytes += len(text.encode())
            self._characters += len(text)
        else:
            bytes_V, characters_V = self._text_sizes
            self._text_bytes += int(bytes_V[tokens].sum())
            self._characters += int(characters_V[tokens].sum())

    @cached_property
    def _text_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        return self._tokenizer.text_sizes()

    def flush(self) -> None:
        """Write the pending documents as a shard."""
        if not self._pending:
            return
        path = self._directory / shard_name(len(self.shards), self._shard_format)
        entry = write_shard(path, self._pending, self._journal.directory / "scratch")
        lengths = [len(tokens) for _, tokens in self._pending]
        info = ShardInfo(
            path=path.name,
            documents=len(lengths),
            tokens=sum(lengths),
            longest_document=max(lengths),
            size=path.stat().st_size,
            sha256=sha256_of(path),
            text_bytes=self._text_bytes,
            characters=self._characters,
        )
        shard = FinishedShard(self.split, info, entry)
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
