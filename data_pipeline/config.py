"""Settings of corpora, mixtures, caches and segments, as frozen dataclasses.

They stand apart from the code that uses them because reading settings must not import numpy.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from foundation.errors import ConfigError
from foundation.settings import MOST, MOST_THREADS, Range, check_ranges, require_no_secrets, setting

SourceKind = Literal[
    "text",
    "lines",
    "wikitext",
    "stream",
    "jsonl",
    "tar",
    "parquet",
    "arrow",
    "mds",
    "megatron",
    "array",
]
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")
ShardFormat = Literal["mds", "webdataset"]
Newlines = Literal["keep", "normalize", "drop"]
BuiltTokenizer = Literal["unigram", "bpe", "bytes", "words", "characters", "unknown"]
# The kinds that are not built here come from a file; `sentencepiece`: a model trained elsewhere.
TokenizerKind = Literal[BuiltTokenizer, "sentencepiece", "huggingface", "tiktoken"]

SMALLEST_VOCABULARY = 300  # the 256 bytes and a few pieces
LARGEST_VOCABULARY = 1 << 24
MOST_LANES = 1 << 17
MOST_ROWS = 1 << 20  # tokens of a segment, or rows of a memory
LARGEST_SEED = (1 << 63) - 1
LARGEST_SHARD_BYTES = 1 << 31  # MDS stores offsets inside a shard in 32 bits


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens: trained on a sample of the training split, or taken from `path`."""

    kind: BuiltTokenizer = "unigram"
    """What to make; unigram and bpe: a SentencePiece model; unknown: the input is token ids."""
    vocab_size: int = setting(16384, Range(SMALLEST_VOCABULARY, LARGEST_VOCABULARY), unit="tokens")
    """Size of the vocabulary; for words the largest size, filled with the most frequent words."""
    training_bytes: int = setting(20_000_000, Range(1, MOST), unit="bytes")
    """Text to train the tokenizer on, sampled evenly over the input."""
    path: Path | None = None
    """Existing tokenizer: directory, tokenizer.json, .model or .tiktoken file; null: make one."""
    end_token: str = ""
    """Token that ends every document; "": the one in the tokenizer's files, or <eos> for words."""
    end_id: int = setting(-1, Range(-1, LARGEST_VOCABULARY))
    """In an input of token ids: the id that ends each document and is stripped; -1: none."""
    pattern: str = ""
    """Regular expression that cuts texts into words, for a .tiktoken file, which lacks it."""
    special_tokens: dict[str, int] = field(default_factory=dict)
    """Ids of the special tokens of a .tiktoken file, by their names."""

    def __post_init__(self) -> None:
        check_ranges("tokenizer.", self)
        if self.path is None and (self.pattern or self.special_tokens):
            raise ConfigError(
                "tokenizer.pattern and tokenizer.special_tokens are for a .tiktoken file; set "
                "tokenizer.path to it, or remove them"
            )


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text becomes which corpus. The same text and settings give the same bytes."""

    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("textcolumn", "textkey", "jsonkeys", "column"), "text_field"),
        **dict.fromkeys(("appendeod", "appendeos", "addeos"), "nothing: a document has its end"),
        **dict.fromkeys(("workers", "numworkers", "numproc"), "threads"),
    }
    input: tuple[Path, ...]
    """Files, or folders read recursively; dot files are ignored."""
    output: Path
    """New directory for the corpus."""
    validation_input: tuple[Path, ...] = ()
    """Files or folders of a separate validation split; then no fraction is used."""
    validation_fraction: float = setting(0.01, Range(0, 1, below=True))
    """Share for validation: documents chosen by a hash of their id, or a stream's end; 0: none."""
    test_bytes: int = setting(0, Range(0, MOST), unit="bytes")
    """Bytes at the very end of each file of format `stream` that are in no split, for tests."""
    format: Literal["auto", SourceKind] = "auto"
    """Format of the input; auto: by a file's name or first bytes; text: one document per file."""
    suffixes: tuple[str, ...] = ()
    """Read only files whose names without .gz or .zst end in one of these; []: all files."""
    text_field: str = "text"
    """Where the text is: JSON field, tar extension (besides txt), or column of texts or ids."""
    token_dtype: str = ""
    """Type of token ids in arrays without a header ("": uint16), and in MDS columns of bytes."""
    id_field: str = "id"
    """Field with a record's id; a record without it is named by its file and number."""
    max_rejects: int = setting(1000, Range(0, MOST), unit="records")
    """Largest number of unusable records; with more, the build stops."""
    newlines: Newlines = "keep"
    """normalize: \\r\\n and \\r become \\n; drop: no \\n stays, as in Transformer-XL's enwik8."""
    split_characters: int = setting(0, Range(0, MOST), unit="characters")
    """Cut longer documents at paragraph ends into NAME#1, NAME#2, ...; 0: never."""
    shuffle_seed: int = setting(-1, Range(-1, MOST))
    """Seed of the random order of the training split's documents; -1: the input's order."""
    shuffle_bytes: int = setting(1 << 28, Range(1 << 10, MOST), unit="bytes")
    """Host memory that each process of a build uses to shuffle documents."""
    shard_format: ShardFormat = "mds"
    """Format of the shards: .mds files, or .tar files of arrays."""
    shard_bytes: int = setting(8 << 20, Range(1, LARGEST_SHARD_BYTES), unit="bytes")
    """Size limit of a shard; a larger document gets a shard of its own."""
    threads: int = setting(0, Range(0, MOST_THREADS), unit="threads")
    """Threads that encode text; 0: one per core."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """How text becomes tokens."""

    def __post_init__(self) -> None:
        check_ranges("", self)
        if not self.input:
            raise ConfigError("input names no file or folder")
        if self.token_dtype not in ("", *TOKEN_DTYPES):
            raise ConfigError(
                f"token_dtype: found {self.token_dtype!r}, expected {', '.join(TOKEN_DTYPES)}"
            )
        if self.is_stream and (self.shuffles or self.split_characters):
            raise ConfigError(
                "format=stream is one text in order; remove shuffle_seed and split_characters"
            )
        if self.test_bytes and not self.is_stream:
            raise ConfigError("test_bytes needs format=stream; set that, or remove test_bytes")

    @property
    def is_stream(self) -> bool:
        """Whether each file is one long text, which lanes enter at any token."""
        return self.format == "stream"

    @property
    def shuffles(self) -> bool:
        """Whether the documents of the training split are shuffled."""
        return self.shuffle_seed >= 0


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Where this node caches shards of remote corpora; all its ranks share the directory."""

    directory: Path | None = None
    """Directory, best on a local disk; null: `xl-pretrain-UID` in the temporary files."""
    gib: float = setting(20.0, Range(0, 1e9, above=True), unit="GiB")
    """Size limit; the least recently used shards are evicted."""

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

    path: Path
    """Directory made by `data-pipeline build`, or the URL it was uploaded to."""
    repeat: float = setting(0.0, Range(0, 1e6), unit="passes")
    """Passes per epoch of the mixture; 0: one, or what the weight asks for."""
    weight: float = setting(0.0, Range(0, MOST))
    """Share of the tokens, relative to other weights; set for all parts or for none; 0: not set."""

    def __post_init__(self) -> None:
        require_no_secrets("mixture", self.path)
        check_ranges(f"mixture of {self.path}: ", self)
        if self.repeat and self.weight:
            raise ConfigError(
                f"mixture of {self.path}: found repeat and weight, expected one of them"
            )
