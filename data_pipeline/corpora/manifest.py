"""The manifest of a split: its shards in order, their sizes and checksums, and the tokenizer.

It is written after everything that it names, so a directory with a manifest is a complete split.
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from foundation.errors import DataError, shown
from foundation.files import open_regular, read_json, settled_state, sha256_of_file, write_json
from foundation.typed_values import (
    Count,
    FileName,
    Positive,
    Sha256,
    between,
    from_tree,
    json_text,
    one_of,
)

MANIFEST_NAME = "manifest.json"
FORMAT = 3  # version of the manifest's fields
TOKENIZER_DIRECTORY = "tokenizer"
FileState = tuple[int, int, int]
SPLITS = ("train", "validation")
DTYPES = {"uint16": 1 << 16, "uint32": 1 << 32}  # dtype of tokens -> how many ids it holds
LARGEST_MANIFEST_BYTES = 1 << 26  # enough for 160,000 shards, which take 400 bytes each
HOW_TO_SPLIT = "build the corpus with validation_fraction above 0 or with validation_input"
MANIFESTS_KEPT = 8  # parsed manifests in a process's cache
LARGEST_FILE_BYTES = 1 << 40  # limit for a shard; builds write 2 GiB or one document at most
REMOTE_NAME = "remote.json"  # marks a cached corpus whose shards are fetched when they are read


@dataclass(frozen=True)
class _Vocabulary:
    vocab_size: Annotated[int, between(1, max(DTYPES.values()))]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard: its file, and the text that its tokens were made of.

    `lengths` is the SHA-256 of a second file with the lengths of its documents (lengths.py).
    """

    path: FileName  # relative to the manifest
    documents: Positive
    tokens: Positive
    longest_document: Positive  # tokens
    size: Annotated[int, between(1, LARGEST_FILE_BYTES)]  # bytes on disk
    sha256: Sha256
    text_bytes: Count  # UTF-8
    characters: Count  # in the text
    lengths: Sha256

    def __post_init__(self) -> None:
        if max(self.documents, self.longest_document) > self.tokens:
            raise ValueError(f"{shown(self.path)} has too few tokens for its documents")

    def tree(self) -> dict[str, Any]:
        """Return the entry in a manifest."""
        return {name: getattr(self, name) for name in _SHARD_FIELDS}  # asdict is slow


_SHARD_FIELDS = tuple(field.name for field in fields(ShardInfo))


def lengths_name(shard: str) -> str:
    """Return the name of the file that has the lengths of a shard's documents."""
    return f"{shard}.lengths"


@dataclass(frozen=True)
class Manifest:
    """A split's shards in their order, and how to read them."""

    dtype: Annotated[str, one_of(*DTYPES)]  # of the tokens
    tokenizer: Sha256  # fingerprint
    end_id: Count  # the token that ends every document
    vocab_size: Positive
    shards: tuple[ShardInfo, ...]
    is_stream: bool = False  # its documents are the parts of one text, in order

    def __post_init__(self) -> None:
        if not self.end_id < self.vocab_size <= DTYPES[self.dtype]:
            raise ValueError(
                f"end_id={self.end_id}, vocab_size={self.vocab_size} and dtype={self.dtype}, "
                "expected an end_id below vocab_size, and a dtype that holds all ids"
            )

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def characters(self) -> int:
        return sum(shard.characters for shard in self.shards)

    @property
    def longest_whole(self) -> int:
        """Tokens of the longest document, which one lane reads whole; 1 in a stream."""
        return 1 if self.is_stream else max((s.longest_document for s in self.shards), default=0)

    @property
    def file_names(self) -> Iterator[str]:
        """The names of all files that the manifest lists: shards and their lengths."""
        for shard in self.shards:
            yield from (shard.path, lengths_name(shard.path))

    @cached_property
    def hash(self) -> str:
        """The split's identity, which changes with its tokens and their order."""
        canonical = json_text(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        content = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**content, "shards": [shard.tree() for shard in self.shards], "format": FORMAT}

    def write(self, directory: Path) -> None:
        """Mark the split in `directory` as complete; all files listed must be on disk already."""
        totals = {"documents": self.documents, "tokens": self.tokens}
        tree = {**self._content(), "hash": self.hash, "totals": totals}
        write_json(directory / MANIFEST_NAME, tree)


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a split; DataError if it is absent, corrupted, or edited by hand.

    A process parses a file again only after it changes: 100,000 shards take seconds.
    """
    path = directory / MANIFEST_NAME
    try:
        state = settled_state(path)
        return (_parsed if state else _parsed.__wrapped__)(path.absolute(), state)
    except FileNotFoundError:
        raise DataError(_missing_manifest(directory)) from None
    except NotADirectoryError:
        file = directory if directory.is_file() else directory.parent
        raise DataError(
            f"{file} is a file; give the directory that `data-pipeline build` wrote"
        ) from None


@functools.lru_cache(maxsize=MANIFESTS_KEPT)
def _parsed(path: Path, state: tuple[int, ...] | None) -> Manifest:
    """Return the manifest in a file; `state` differs if the file has changed (`settled_state`)."""
    with _corrupted(path):
        tree = read_json(path, LARGEST_MANIFEST_BYTES)
        version = tree.get("format") if isinstance(tree, dict) else None
        if type(version) is not int or version != FORMAT:
            raise DataError(
                f"{path} has format {shown(version)}, this version reads format {FORMAT}; "
                "build the corpus again"
            )
        content = {name: tree[name] for name in tree if name not in ("format", "hash", "totals")}
        manifest = from_tree(Manifest, content)
    if (actual := manifest.hash) != tree.get("hash"):
        raise DataError(
            f"{path} was changed after it was written: its contents hash to {actual[:16]}, "
            f"it records {shown(tree.get('hash'))}; restore it or build the corpus again"
        )
    return manifest


def read_vocab_size(path: Path) -> int:
    """Return the size of the vocabulary from the file of a manifest, checking nothing else."""
    with _corrupted(path):
        tree = read_json(path, LARGEST_MANIFEST_BYTES)
        return from_tree(_Vocabulary, tree, is_open=True).vocab_size


@contextlib.contextmanager
def _corrupted(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise DataError(f"{path} is corrupted ({error}); build the corpus again") from None


def is_left_out(directory: Path) -> bool:
    """Whether a corpus was built without the split that would be in `directory`."""
    is_absent = not directory.exists() or not any(directory.iterdir())
    has_train = (directory.parent / SPLITS[0] / MANIFEST_NAME).exists()
    return is_absent and has_train and directory.name in SPLITS


def _missing_manifest(directory: Path) -> str:
    directory = directory.absolute()  # the reader of the message may be in another directory
    corpus = directory.parent
    if is_left_out(directory):
        return f"data.path={_location(corpus)} has no {directory.name} split; {HOW_TO_SPLIT}"
    if (corpus / MANIFEST_NAME).exists():
        return f"{corpus} is one split of a corpus; name the corpus, {corpus.parent}"
    if not directory.exists() and (splits := _splits_in(corpus)):
        return f"{corpus} has no split {directory.name!r}, it has {', '.join(splits)}"
    if not directory.exists():
        return f"{directory} does not exist; correct the path (data.path=), or build the corpus"
    if splits := _splits_in(directory):
        return (
            f"{directory} holds the splits {', '.join(splits)}; give one of them, such as "
            f"{directory / splits[0]}"
        )
    return (
        f"{directory} has no {MANIFEST_NAME}, so it is not a finished corpus; "
        "run `data-pipeline build` to its end"
    )


def _splits_in(corpus: Path) -> list[str]:
    return sorted(manifest.parent.name for manifest in corpus.glob(f"*/{MANIFEST_NAME}"))


def _location(corpus: Path) -> str:
    """Return the location of the corpus that the user gave: for a cached copy, its URL."""
    try:
        return str(read_json(corpus / REMOTE_NAME)["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(corpus)


def splits_of(path: Path) -> list[Path]:
    """Return `path` if it is a split, else the splits in it.

    DataError if there are no splits, or if the directory of one has no manifest.
    """
    if (path / MANIFEST_NAME).exists():
        return [path]
    splits = [path / split for split in SPLITS if (path / split).is_dir()]
    for directory in splits or [path]:
        if not (directory / MANIFEST_NAME).exists():
            read_manifest(directory)  # raises with the reason
    return splits


def check_shard(path: Path, info: ShardInfo, with_hash: bool = True) -> None:
    """Raise DataError unless the file is the one that the manifest describes."""
    with open_shard(path) as file:
        check_opened(path, file, info, with_hash)


def open_shard(path: Path) -> BinaryIO:
    """Open a shard; DataError if it is missing, or is no regular file."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise DataError(f"shard {path} is missing; restore it or build the corpus again") from None
    except ValueError as error:
        raise DataError(
            f"shard {path} cannot be read ({error}); restore it or build the corpus again"
        ) from None


def check_opened(path: Path, file: BinaryIO, info: ShardInfo, with_hash: bool = True) -> None:
    """Raise DataError unless the opened file is the manifest's shard, whatever is at `path` now."""
    if problem := mismatch_of(file, info, with_hash):
        raise DataError(
            f"shard {path} is corrupted: {problem}; restore it or build the corpus again"
        )


def file_state(file: BinaryIO) -> FileState:
    """Return what changes when a file is replaced or written: inode, size, time of last change."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def mismatch(path: Path, info: ShardInfo, with_hash: bool = True) -> str | None:
    """Return how an existing file differs from the manifest's entry, or None if it does not."""
    with open(path, "rb") as file:
        return mismatch_of(file, info, with_hash)


def mismatch_of(file: BinaryIO, info: ShardInfo, with_hash: bool = True) -> str | None:
    """Return how an opened file differs from the manifest's entry, or None if it does not."""
    if (size := os.fstat(file.fileno()).st_size) != info.size:
        return f"it has {size} bytes, the manifest expects {info.size}"
    if with_hash and (digest := sha256_of_file(file)) != info.sha256:
        return f"its SHA-256 is {digest[:16]}, the manifest expects {info.sha256[:16]}"
    return None
