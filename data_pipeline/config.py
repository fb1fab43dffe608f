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
from data_pipeline.setting_fields import MOST, MOST_THREADS, Range, check_ranges, setting

SMALLEST_VOCABULARY = 300  # the 256 bytes and a few pieces
LARGEST_VOCABULARY = 1 << 24
LARGEST_SHARD_BYTES = 1 << 31  # MDS stores offsets inside a shard in 32 bits


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens: trained on a sample of the training split, or taken from `path`."""

    kind: Literal["unigram", "bpe", "bytes"] = "unigram"
    # `bytes` always has 257.
    vocab_size: int = setting(16384, Range(SMALLEST_VOCABULARY, LARGEST_VOCABULARY))
    # Of text, sampled evenly over the input.
    training_bytes: int = setting(20_000_000, Range(1, MOST))
    path: Path | None = None  # use this tokenizer directory or SentencePiece model; do not train

    def __post_init__(self) -> None:
        check_ranges("tokenizer.", self)


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text becomes which corpus. The same text and settings give the same bytes."""

    input: tuple[Path, ...]  # files, or folders read recursively; dot files are ignored
    output: Path
    validation_input: tuple[Path, ...] = ()  # separate validation set; then no fraction is used
    # Of the documents, chosen by a hash of their id; 0: none.
    validation_fraction: float = setting(0.01, Range(0, 1, below=True))
    format: Literal["auto", "text", "jsonl", "tar", "parquet"] = "auto"  # auto: by name or head
    suffixes: tuple[str, ...] = ()  # only files with these endings before .gz or .zst; (): all
    text_field: str = "text"  # JSON field, Parquet column, or extension of a tar member besides txt
    id_field: str = "id"  # a record without this field is named by its file and number
    # Longer records are rejected.
    max_document_bytes: int = setting(1 << 28, Range(1, LARGEST_SHARD_BYTES // 8))
    max_rejects: int = setting(1000, Range(0, MOST))  # more unusable records stop the build
    normalize_newlines: bool = False  # make every \r\n and \r of a text a \n
    drop_duplicates: bool = False  # keep only the first of documents with equal text
    # Cut longer documents into NAME#1, NAME#2, ...; 0: never.
    split_characters: int = setting(0, Range(0, MOST))
    shard_format: Literal["mds", "webdataset"] = "mds"  # .mds files, or .tar files of arrays
    shard_bytes: int = setting(8 << 20, Range(1, LARGEST_SHARD_BYTES))
    threads: int = setting(0, Range(0, MOST_THREADS))  # that encode text; 0: one per core
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def __post_init__(self) -> None:
        check_ranges("", self)
        if not self.input:
            raise ConfigError("input names no file or folder")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Where this node caches shards of remote corpora; all its ranks share the directory."""

    directory: Path | None = None  # on a local disk; null: `xl-pretrain-UID` in the temporary files
    # Size limit; the least recently used shards are evicted.
    gib: float = setting(20.0, Range(0, 1e9, above=True))

    def __post_init__(self) -> None:
        check_ranges("data.cache.", self)

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
    repeat: float = setting(0.0, Range(0, 1e6))  # 0: once, or what the weight asks for
    # 0: `repeat` counts; all parts of a mixture have a weight or none has.
    weight: float = setting(0.0, Range(0, MOST))

    def __post_init__(self) -> None:
        check_ranges(f"mixture of {self.path}: ", self)
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
