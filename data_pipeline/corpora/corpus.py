"""One split of a built corpus, opened for reading: manifest, tokenizer, shards that are checked when first used."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from data_pipeline.corpora.manifest import (
    MANIFEST_NAME,
    REMOTE_NAME,
    TOKENIZER_DIRECTORY,
    Manifest,
    ShardInfo,
    check_shard,
    read_manifest,
)
from data_pipeline.errors import DataError
from data_pipeline.location import shown
from data_pipeline.shards.shards import ShardReader

OPEN_SHARDS = 16


class ShardSource(Protocol):
    """Where a split's shards come from."""

    place: str  # of the split, for people
    keep_open: int  # shards that may stay open though nobody reads them

    def open(self, info: ShardInfo, dtype: str) -> ShardReader:
        """The shard, of the size and SHA-256 that `info` says; DataError when it cannot be had."""
        ...

    def prefetch(self, shards: Sequence[ShardInfo]) -> None:
        """Be told what is opened soon."""
        ...

    def check_room(self, num_shards: int, largest: int) -> None:
        """DataError unless so many shards of at most `largest` bytes can be open at once."""
        ...


class LocalShards:
    """Shards that lie beside their manifest; the SHA-256 of each is checked when it is first opened."""

    keep_open = OPEN_SHARDS

    def __init__(self, directory: Path, check_hashes: bool = True) -> None:
        self.place = str(directory)
        self._directory = directory
        self._check_hashes = check_hashes
        self._verified: set[str] = set()

    def open(self, info: ShardInfo, dtype: str) -> ShardReader:
        path = self._directory / info.path
        check_shard(path, info, with_hash=self._check_hashes and info.path not in self._verified)
        self._verified.add(info.path)
        return ShardReader(path, dtype)

    def prefetch(self, shards: Sequence[ShardInfo]) -> None:
        """The operating system reads ahead by itself."""

    def check_room(self, num_shards: int, largest: int) -> None:
        """They are on this disk already."""


class Corpus:
    """The shards of one split. Opening a shard checks its size and headers always, its SHA-256 the first time."""

    def __init__(self, directory: Path, manifest: Manifest, source: ShardSource) -> None:
        self.directory = directory
        self.manifest = manifest
        self._source = source
        self._open: OrderedDict[int, ShardReader] = OrderedDict()  # last used last
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, check_hashes: bool = True) -> Corpus:
        """Open the split in `path`; DataError when it has no manifest, no documents, or lacks a shard."""
        path = Path(path)
        manifest = read_manifest(path)
        if not manifest.shards:
            raise DataError(
                f"{path / MANIFEST_NAME} lists no shards; the split is empty: build it from more text"
            )
        if (path.parent / REMOTE_NAME).exists():
            from data_pipeline.corpora.remote_corpus import cached_shards

            return cls(path, manifest, cached_shards(path))
        present = set(os.listdir(path))
        missing = [shard.path for shard in manifest.shards if shard.path not in present]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DataError(
                f"shard {path / missing[0]}{others} is missing; restore it or build the corpus again"
            )
        return cls(path, manifest, LocalShards(path, check_hashes))

    @property
    def place(self) -> str:
        """Where its shards come from: a directory or a URL."""
        return self._source.place

    @property
    def identity(self) -> str:
        """What a run's state says of its data: another value means other tokens or another order."""
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
        """Shard `index`, opened and checked; DataError names a shard that is missing, truncated or altered."""
        with self._lock:
            reader = self._open.get(index)
            if reader is None:
                reader = self._open[index] = self._open_shard(index)
                if len(self._open) > self._source.keep_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(index)
            return reader

    def document_lengths(self, index: int) -> np.ndarray:
        """Tokens of each document of shard `index`, in the order in which they are stored."""
        return self.shard(index).lengths

    def prefetch(self, indices: Iterable[int]) -> None:
        """Say which shards are read soon, so that remote ones are there in time."""
        self._source.prefetch([self.manifest.shards[index] for index in indices])

    def check_room(self, num_shards: int) -> None:
        """DataError unless so many shards can be open at once."""
        self._source.check_room(num_shards, max(shard.size for shard in self.manifest.shards))

    def _open_shard(self, index: int) -> ShardReader:
        info = self.manifest.shards[index]
        reader = self._source.open(info, self.manifest.dtype)
        found = (len(reader), int(reader.lengths.sum()))
        if found != (info.documents, info.tokens):
            raise DataError(
                f"shard {shown(reader.path)} holds {found[0]} documents and {found[1]} tokens, the manifest says "
                f"{info.documents} and {info.tokens}; restore it or build the corpus again"
            )
        return reader


def split_directory(path: Path, split: str = "train") -> Path:
    """`path` itself if it is a split, else its split of that name: commands take either."""
    return path if (path / MANIFEST_NAME).exists() or not (path / split).is_dir() else path / split
