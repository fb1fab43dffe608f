"""Settings of corpora, mixtures, caches and segments, as frozen dataclasses.

They stand apart from the code that uses them because reading settings must not import numpy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data_pipeline.errors import ConfigError

SMALLEST_VOCABULARY = 300  # the 256 bytes and a few pieces
LARGEST_SHARD_BYTES = 1 << 31  # MDS stores offsets inside a shard in 32 bits


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens: trained on a sample of the training split, or taken from `path`."""

    kind: Literal["unigram", "bpe", "bytes"] = "unigram"
    vocab_size: int = 16384  # `bytes` always has 257
    training_bytes: int = 20_000_000  # of text, sampled evenly over the input
    path: Path | None = None  # use this tokenizer directory or SentencePiece model; do not train

    def __post_init__(self) -> None:
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"tokenizer.vocab_size={self.vocab_size} is too small for the 256 bytes and other "
                f"pieces; use {SMALLEST_VOCABULARY} or more, or tokenizer.kind=bytes"
            )
        if self.training_bytes < 1:
            raise ConfigError(f"tokenizer.training_bytes={self.training_bytes} must be positive")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text becomes which corpus. The same text and settings give the same bytes."""

    input: tuple[Path, ...]  # files, or folders read recursively; dot files are ignored
    output: Path
    validation_input: tuple[Path, ...] = ()  # separate validation set; then no fraction is used
    validation_fraction: float = 0.01  # of the documents, chosen by a hash of their id; 0: none
    format: Literal["auto", "text", "jsonl", "tar", "parquet"] = "auto"  # auto: by name or head
    suffixes: tuple[str, ...] = ()  # only files with these endings before .gz or .zst; (): all
    text_field: str = "text"  # JSON field, Parquet column, or extension of a tar member besides txt
    id_field: str = "id"  # a record without this field is named by its file and number
    max_document_bytes: int = 1 << 28  # longer records are rejected
    max_rejects: int = 1000  # more unusable records than this stop the build
    drop_duplicates: bool = False  # keep only the first of documents with equal text
    split_characters: int = 0  # cut longer documents into NAME#1, NAME#2, ...; 0: never
    shard_format: Literal["mds", "webdataset"] = "mds"  # .mds files, or .tar files of arrays
    shard_bytes: int = 8 << 20
    threads: int = 0  # that encode text; 0: one per core
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("input names no file or folder")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ConfigError(
                f"validation_fraction={self.validation_fraction} must be at least 0 and below 1"
            )
        for name, largest in (
            ("shard_bytes", LARGEST_SHARD_BYTES),
            ("max_document_bytes", LARGEST_SHARD_BYTES // 8),
        ):
            if not 1 <= getattr(self, name) <= largest:
                raise ConfigError(f"{name}={getattr(self, name)} must be between 1 and {largest}")
        if self.max_rejects < 0 or self.threads < 0:
            raise ConfigError("max_rejects and threads must be 0 or more")
        if self.split_characters < 0:
            raise ConfigError(
                f"split_characters={self.split_characters} must be positive, or 0 for never"
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Where this node caches shards of remote corpora; all its ranks share the directory."""

    directory: Path | None = None  # on a local disk; null: `xl-pretrain-UID` in the temporary files
    gib: float = 20.0  # size limit; the least recently used shards are evicted

    def __post_init__(self) -> None:
        if self.gib <= 0:
            raise ConfigError(f"data.cache.gib={self.gib:g} must be positive")

    @property
    def path(self) -> Path:
        """The directory that is used, also when none was configured."""
        if self.directory is not None:
            return self.directory.expanduser()
        return Path(tempfile.gettempdir()) / f"xl-pretrain-{os.getuid()}"


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """A corpus of a mixture: `repeat` passes per epoch, or tokens in proportion to `weight`."""

    path: Path  # a directory made by `data-pipeline build`, or the URL it was uploaded to
    repeat: float = 0.0  # 0: once, or what the weight asks for
    weight: float = 0.0  # 0: `repeat` counts; all parts of a mixture have a weight or none has

    def __post_init__(self) -> None:
        if self.repeat < 0 or self.weight < 0:
            raise ConfigError(
                f"mixture of {self.path}: repeat={self.repeat} and weight={self.weight} "
                "must be positive"
            )
        if self.repeat and self.weight:
            raise ConfigError(
                f"mixture of {self.path}: found repeat and weight, expected one of them"
            )


@dataclass(frozen=True)
class SegmentLengths:
    """The tokens that each lane reads at every step since it started.

    A step reads `first` tokens, or the length of the last of `changes` at or before it. ConfigError
    unless the changes are in order and all lengths are positive.
    """

    first: int
    changes: Sequence[tuple[int, int]] = ()  # (step, length)

    def __post_init__(self) -> None:
        steps = [0, *(step for step, _ in self.changes)]
        shortest = min(self.first, *(length for _, length in self.changes), 1)
        if sorted(set(steps)) != steps or shortest < 1:
            changes = ", ".join(f"{step}={length}" for step, length in self.changes)
            raise ConfigError(
                f"segments of {self.first} tokens, then from step=length {changes}: expected "
                "positive lengths, and each change at a later step than the one before"
            )

    def at(self, step: int) -> int:
        """Return the length of the step's segments."""
        lengths = (length for start, length in reversed(self.changes) if start <= step)
        return next(lengths, self.first)

    def tokens_before(self, step: int) -> int:
        """Return how many tokens of a lane the steps before `step` read."""
        ends = [*(start for start, _ in self.changes), step]
        return sum(
            self.at(start) * max(0, min(end, step) - start)
            for start, end in zip([0, *ends], ends, strict=False)
        )

    def step_of(self, token: int) -> int:
        """Return the step that reads the lane's token number `token`."""
        starts = (start for start, _ in reversed(self.changes))
        start = next((start for start in starts if self.tokens_before(start) <= token), 0)
        return start + (token - self.tokens_before(start)) // self.at(start)
