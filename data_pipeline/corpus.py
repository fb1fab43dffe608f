"""One split of a built corpus, opened for reading: manifest, tokenizer, shards that are checked when first used."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.files import sha256_of
from data_pipeline.manifest import MANIFEST_NAME, Manifest, ShardInfo, read_manifest
from data_pipeline.shards import ShardReader

OPEN_SHARDS = 16
TOKENIZER_DIRECTORY = "tokenizer"
SPLITS = ("train", "validation")


class Corpus:
    """The shards of one split. Opening a shard checks its size and headers always, its SHA-256 the first time."""

    def __init__(self, directory: Path, manifest: Manifest, check_hashes: bool = True) -> None:
        self.directory = directory
        self.manifest = manifest
        self._check_hashes = check_hashes
        self._verified = np.zeros(len(manifest.shards), bool)
        self._open: OrderedDict[int, ShardReader] = OrderedDict()  # last used last
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, check_hashes: bool = True) -> Corpus:
        """Open the split in `path`; DataError when it has no manifest, no documents, or lacks a shard."""
        path = Path(path)
        manifest = read_manifest(path)
        if not manifest.shards:
            raise DataError(f"{path / MANIFEST_NAME} lists no shards; the split is empty: build it from more text")
        present = set(os.listdir(path))
        missing = [shard.path for shard in manifest.shards if shard.path not in present]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DataError(f"shard {path / missing[0]}{others} is missing; restore it or build the corpus again")
        return cls(path, manifest, check_hashes)

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
                if len(self._open) > OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(index)
            return reader

    def document_lengths(self, index: int) -> np.ndarray:
        """Tokens of each document of shard `index`, in the order in which they are stored."""
        return self.shard(index).lengths

    def _open_shard(self, index: int) -> ShardReader:
        info = self.manifest.shards[index]
        path = self.directory / info.path
        check_shard(path, info, with_hash=self._check_hashes and not self._verified[index])
        self._verified[index] = True
        reader = ShardReader(path, self.manifest.dtype)
        found = (len(reader), int(reader.lengths.sum()))
        if found != (info.documents, info.tokens):
            raise DataError(
                f"shard {path} holds {found[0]} documents and {found[1]} tokens, the manifest says {info.documents} "
                f"and {info.tokens}; restore it or build the corpus again"
            )
        return reader


def check_shard(path: Path, info: ShardInfo, with_hash: bool = True) -> None:
    """Nothing, if the file is the one the manifest describes; else DataError with its name and what differs."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"shard {path} is missing; restore it or build the corpus again") from None
    if size != info.size:
        raise DataError(
            f"shard {path} has {size} bytes, the manifest says {info.size}; restore it or build the corpus again"
        )
    if with_hash and (found := sha256_of(path)) != info.sha256:
        raise DataError(
            f"shard {path} is damaged: its SHA-256 is {found[:16]}, the manifest says {info.sha256[:16]}; "
            "restore it or build the corpus again"
        )


def split_directory(path: Path, split: str = "train") -> Path:
    """`path` itself if it is a split, else its split of that name: commands take either."""
    return path if (path / MANIFEST_NAME).exists() or not (path / split).is_dir() else path / split
