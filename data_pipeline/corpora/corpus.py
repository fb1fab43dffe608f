"""One split of a built corpus, opened for reading. Shards are checked when they are first used."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.config import CacheConfig
from data_pipeline.corpora.corpus_identity import check_tokenizer
from data_pipeline.corpora.lengths import check_lengths_of, lengths_beside
from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    TOKENIZER_DIRECTORY,
    Manifest,
    ShardInfo,
    check_opened,
    file_state,
    open_shard,
    read_manifest,
)
from data_pipeline.corpora.remote_corpus import CachedShards, cached_shards
from data_pipeline.shards.shards import ShardReader
from foundation.errors import DataError
from foundation.paths import path_below, path_text

OPEN_SHARDS = 16  # local shards that stay mapped


class LocalShards:
    """Shards in the directory of their manifest; SHA-256 is checked on the first opening.

    `CachedShards` of remote_corpus.py has the same methods for the shards of a store.
    """

    keep_open = OPEN_SHARDS

    def __init__(self, directory: Path, check_hashes: bool = True) -> None:
        self.location = str(directory)
        self._directory = directory
        self._check_hashes = check_hashes
        self._verified: dict[str, tuple[int, ...]] = {}  # name -> the file's state when checked

    def open(self, info: ShardInfo, dtype: str) -> ShardReader:
        path = path_below(self._directory, info.path)
        with open_shard(path) as file:
            # A file's owner can reset its mtime, but not its ctime.
            state = (*file_state(file), os.fstat(file.fileno()).st_ctime_ns)
            is_new = self._verified.get(info.path) != state
            check_opened(path, file, info, with_hash=self._check_hashes and is_new)
            self._verified[info.path] = state
            return ShardReader(path, dtype, file)

    def lengths(self, info: ShardInfo) -> np.ndarray:
        """Return the lengths in the file next to the shard."""
        return lengths_beside(self._directory, info)

    def prefetch_lengths(self, shards: Sequence[ShardInfo]) -> None:
        """Do nothing, as `prefetch`."""

    def prefetch(self, shards: Sequence[ShardInfo]) -> None:
        """Do nothing: the operating system reads ahead."""

    def check_capacity(self, num_shards: int, largest: int) -> None:
        """Do nothing: all shards are on this disk."""


class Corpus:
    """The shards of one split. Every opening checks a shard's size and headers."""

    def __init__(
        self, directory: Path, manifest: Manifest, source: LocalShards | CachedShards
    ) -> None:
        """DataError without shards: a part of a build may have no document of a split."""
        if not manifest.shards:
            raise DataError(
                f"{directory / MANIFEST_NAME} lists no shards; the split is empty: "
                "build it from more text"
            )
        self.directory = directory
        self.manifest = manifest
        self._source = source
        self._open: OrderedDict[int, ShardReader] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, path: Path, check_hashes: bool = True, cache: CacheConfig | None = None
    ) -> Corpus:
        """Open the split in `path`. If it is a copy in `cache`, its shards come from the store.

        DataError if its manifest or a shard is missing, or the tokenizer is not the manifest's.
        """
        path = Path(path)
        manifest = read_manifest(path)
        check_tokenizer(path, manifest.tokenizer)
        if cache and (shards := cached_shards(path, cache)):
            return cls(path, manifest, shards)
        present = set(os.listdir(path))
        missing = [name for name in manifest.file_names if name not in present]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DataError(
                f"shard {path / missing[0]}{others} is missing; "
                "restore it or build the corpus again"
            )
        return cls(path, manifest, LocalShards(path, check_hashes))

    @property
    def location(self) -> str:
        """The directory or URL that its shards come from."""
        return self._source.location

    @property
    def identity(self) -> str:
        """What a run's state records of its data: changes with the tokens or their order."""
        return self.manifest.hash

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory.parent / TOKENIZER_DIRECTORY

    @property
    def num_tokens(self) -> int:
        return self.manifest.tokens

    @property
    def num_documents(self) -> int:
        return self.manifest.documents

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return self.manifest.text_bytes

    @property
    def num_characters(self) -> int:
        return self.manifest.characters

    def shard(self, index: int) -> ShardReader:
        """Open and check shard `index`; DataError if it is missing, truncated or altered."""
        with self._lock:
            reader = self._open.get(index)
            if reader is None:
                reader = self._open[index] = self._open_shard(index)
                if len(self._open) > self._source.keep_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(index)
            return reader

    def document_lengths(self, index: int) -> np.ndarray:
        """Return the tokens of each document of shard `index`, in the order of storage."""
        reader = self._open.get(index)
        return reader.lengths if reader else self._source.lengths(self.manifest.shards[index])

    def prefetch_lengths(self, indices: Iterable[int]) -> None:
        """Start to fetch the lengths of the documents of remote shards."""
        self._source.prefetch_lengths([self.manifest.shards[index] for index in indices])

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start to fetch remote shards that are read soon."""
        self._source.prefetch([self.manifest.shards[index] for index in indices])

    def check_capacity(self, num_shards: int) -> None:
        """Raise DataError unless that many shards can be open at the same time."""
        self._source.check_capacity(num_shards, max(shard.size for shard in self.manifest.shards))

    def _open_shard(self, index: int) -> ShardReader:
        info = self.manifest.shards[index]
        reader = self._source.open(info, self.manifest.dtype)
        counts = (len(reader), int(reader.lengths.sum()))
        if counts != (info.documents, info.tokens):
            raise DataError(
                f"shard {path_text(reader.path)} holds {counts[0]} documents and "
                f"{counts[1]} tokens, the manifest expects {info.documents} and {info.tokens}; "
                "restore it or build the corpus again"
            )
        check_lengths_of(info, reader.lengths, path_text(reader.path))
        return reader


def split_directory(path: Path, split: str = "train") -> Path:
    """Return `path` if it is a split, else its split of that name: commands accept both."""
    return path if (path / MANIFEST_NAME).exists() or not (path / split).is_dir() else path / split
