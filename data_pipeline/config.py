"""Settings of `data-pipeline build`, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data_pipeline.errors import ConfigError

SMALLEST_VOCABULARY = 300  # the 256 bytes and a little
LARGEST_SHARD_BYTES = 1 << 31  # MDS counts bytes inside a shard with 32 bits


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens: trained on a sample of the training split, or taken from `path`."""

    kind: Literal["unigram", "bpe", "bytes"] = "unigram"
    vocab_size: int = 16384  # `bytes` always has 257
    training_bytes: int = 20_000_000  # of text, spread evenly over the input
    path: Path | None = (
        None  # an existing tokenizer directory or SentencePiece model, instead of training one
    )

    def __post_init__(self) -> None:
        if self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"tokenizer.vocab_size={self.vocab_size} leaves no room beside the 256 bytes; use "
                f"{SMALLEST_VOCABULARY} or more, or tokenizer.kind=bytes"
            )
        if self.training_bytes < 1:
            raise ConfigError(f"tokenizer.training_bytes={self.training_bytes} must be positive")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text becomes which corpus. The same text and settings give the same bytes."""

    input: tuple[
        Path, ...
    ]  # files, or folders read recursively; names that start with a dot are left out
    output: Path
    validation_input: tuple[
        Path, ...
    ] = ()  # an own validation set; leave validation_fraction at 0 with it
    validation_fraction: float = 0.01  # of the documents, chosen by a hash of their id; 0: none
    format: Literal["auto", "text", "jsonl", "tar", "parquet"] = (
        "auto"  # auto: what the name says, else text
    )
    suffixes: tuple[str, ...] = ()  # only files whose name ends so, before .gz or .zst; (): all
    text_field: str = "text"  # of a JSON object, a column of Parquet, or the extension of a tar's member beside txt
    id_field: str = "id"  # where a record lacks it, its place names the document
    max_document_bytes: int = 1 << 28  # longer records are rejected
    max_rejects: int = 1000  # unusable records beyond this number stop the build
    drop_duplicates: bool = False  # keep only the first of documents whose text is the same
    split_characters: int = (
        0  # cut longer documents at paragraph ends, ids NAME#1, NAME#2, ...; 0: never
    )
    shard_format: Literal["mds", "webdataset"] = (
        "mds"  # .mds files, or .tar files with an array for each document
    )
    shard_bytes: int = 8 << 20
    threads: int = 0  # encoding text; 0: one per core
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def __post_init__(self) -> None:
        if not self.input:
            raise ConfigError("input names no file or folder")
        if not 0.0 <= self.validation_fraction < 1.0:
            raise ConfigError(
                f"validation_fraction={self.validation_fraction} must be at least 0 and below 1"
            )
        if not 1 <= self.shard_bytes <= LARGEST_SHARD_BYTES:
            raise ConfigError(
                f"shard_bytes={self.shard_bytes} must be between 1 and {LARGEST_SHARD_BYTES}"
            )
        if not 1 <= self.max_document_bytes <= LARGEST_SHARD_BYTES // 8:
            raise ConfigError(
                f"max_document_bytes={self.max_document_bytes} must be between 1 and {LARGEST_SHARD_BYTES // 8}"
            )
        if self.max_rejects < 0 or self.threads < 0:
            raise ConfigError("max_rejects and threads must be 0 or more")
        if self.split_characters < 0:
            raise ConfigError(
                f"split_characters={self.split_characters} must be positive, or 0 for never"
            )
