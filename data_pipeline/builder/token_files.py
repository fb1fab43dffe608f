"""Tokens without text: Megatron's .bin with its .idx, and arrays of numpy, as nanoGPT writes them.

Arrays are mapped into memory and read in blocks. Nothing is unpickled.

Records of MDS shards that others wrote, such as LLM Foundry: text, or arrays of tokens.

Layout: data_pipeline/shards/mds.py. Only the columns that are asked for are read; one that holds
pickled values is refused.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.builder.formats import (
    INDEX_SUFFIX,
    InvalidRecords,
    UnreadableRecords,
    decompressed,
    is_compressed,
    unpacked_zst,
)
from data_pipeline.builder.listings import MDS_INDEX
from data_pipeline.builder.records import (
    Document,
    Records,
    Reject,
    Tell,
    document_id,
    document_of_bytes,
    document_of_tokens,
)
from data_pipeline.builder.sources import SourceFile
from data_pipeline.config import LARGEST_SHARD_BYTES, TOKEN_DTYPES, CorpusConfig
from data_pipeline.shards.mds import InvalidShard, read_head
from foundation.errors import ConfigError, DataError
from foundation.files import LARGEST_READ_BYTES, named_errors, open_regular, read_regular

# The head of an .idx: magic, version, code of the type, numbers of sequences and of documents + 1.
HEAD = struct.Struct("<9sQBQQ")
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
INTEGERS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by Megatron's codes
ARRAY_SUFFIX, NUMPY_MAGIC = ".npy", b"\x93NUMPY"
# First bytes of what holds no plain numbers, besides those of other formats.
NO_ARRAY = {
    (20240520).to_bytes(4, "little"): "it has a header of llm.c, 1,024 bytes: remove it",
    (20240801).to_bytes(4, "little"): "it has a header of llm.c, 1,024 bytes: remove it",
    MAGIC: "it is an index of Megatron: name its .bin file",
}
# The upper halves of ids are below 16 where a vocabulary has less than a million ids.
FEWEST_PARTS, SMALL = 16, 16
BLOCK = 1 << 20  # tokens that are searched for a separator at once


def read_megatron(
    source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]
) -> Records:
    """Yield a document for each of the index beside the .bin file."""
    if source.path.suffix == INDEX_SUFFIX:
        raise UnreadableRecords("it is an index of Megatron: name its .bin file")
    dtype, lengths, starts, ends = _read_index(source.path.with_suffix(INDEX_SUFFIX))
    _check_type(dtype, source.path, config)
    tokens = _mapped_plain(source.path, dtype)
    _check_width(tokens)
    last = int((starts + dtype.itemsize * lengths.astype(np.int64)).max(initial=0))
    if last < tokens.nbytes:
        raise InvalidRecords(f"its index ends at byte {last:,}, the file at {tokens.nbytes:,}")
    if (total := int(np.abs(lengths.astype(np.int64)).sum())) > len(tokens):
        raise InvalidRecords(f"its index has {total:,} tokens, the file {len(tokens):,}")
    done = 0
    follow(lambda: done)
    for number in range(len(ends) - 1):
        location = f"{source.name}:{number + 1}"
        parts = []
        for sequence in range(ends[number], ends[number + 1]):
            first, odd = divmod(int(starts[sequence]), dtype.itemsize)
            done = int(starts[sequence])
            if odd or first < 0 or not 0 <= lengths[sequence] <= len(tokens) - first:
                raise InvalidRecords(f"its index puts sequence {sequence} outside of it")
            parts.append(tokens[first : first + lengths[sequence]])
        values = np.concatenate(parts) if parts else tokens[:0]
        yield document_of_tokens(values, location, location, config)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the type of the tokens, length and offset of each sequence, and where documents end.

    Offsets are in bytes; document n has the sequences from ends[n] to before ends[n + 1].
    """
    try:
        content = read_regular(path, LARGEST_READ_BYTES)
        magic, version, code, sequences, documents = HEAD.unpack_from(content)
        size = HEAD.size + 12 * sequences + 8 * documents
        if magic != MAGIC or version != VERSION or code not in INTEGERS or len(content) != size:
            raise ValueError(f"{len(content):,} bytes, version {version}, type {code}")
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing, the index of the .bin file beside it; restore it, or set "
            "format=array for tokens without one"
        ) from None
    except (ValueError, struct.error) as error:
        raise DataError(f"{path} is not an index of Megatron ({error}); restore it") from None
    lengths = np.frombuffer(content, "<i4", sequences, HEAD.size)
    starts = np.frombuffer(content, "<i8", sequences, HEAD.size + 4 * sequences)
    ends = np.frombuffer(content, "<i8", documents, HEAD.size + 12 * sequences)
    if not documents or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise DataError(f"{path} is corrupted (its documents are not in order); restore it")
    return np.dtype(INTEGERS[code]), lengths, starts, ends


def read_array(source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]) -> Records:
    """Yield what is between separators of a .npy file, or of plain numbers of `token_dtype`.

    Without a separator the file is one document.
    """
    dtype = np.dtype(config.token_dtype).newbyteorder("<") if config.token_dtype else None
    tokens = _mapped(source.path, dtype, config)
    done = 0
    follow(lambda: done * tokens.itemsize)
    for number, (start, end) in enumerate(_between(tokens, config.tokenizer.end_id), 1):
        done = end
        if end > start:
            location = f"{source.name}:{number}"
            yield document_of_tokens(tokens[start:end], location, location, config)


def _between(tokens: np.ndarray, separator: int) -> Iterator[tuple[int, int]]:
    start = 0
    if separator >= 0:
        for block in range(0, len(tokens), BLOCK):
            for found in np.flatnonzero(tokens[block : block + BLOCK] == separator).tolist():
                yield start, block + found
                start = block + found + 1
    if start < len(tokens):
        yield start, len(tokens)


def _mapped(path: Path, dtype: np.dtype | None, config: CorpusConfig) -> np.ndarray:
    """Return the numbers of a file, in its order: by its own header, or of `dtype`."""
    with named_errors(path), open_regular(path) as file:
        head = file.read(8)
        for magic, what in NO_ARRAY.items():
            if head.startswith(magic):
                raise UnreadableRecords(f"{what}; expected plain numbers")
        if head.startswith(NUMPY_MAGIC):
            tokens = _mapped_numpy(path)
        elif path.suffix.lower() == ARRAY_SUFFIX and dtype is None:
            raise UnreadableRecords(
                "it has no header of numpy; set token_dtype if it holds plain numbers, as OLMo's do"
            )
        else:
            tokens = _mapped_plain(path, dtype or np.dtype("<u2"))
    _check_type(tokens.dtype, path, config)
    _check_width(tokens)
    return tokens


def _mapped_numpy(path: Path) -> np.ndarray:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # never a pickle or an archive
    except OSError:
        raise
    except Exception as error:  # whatever the parser of its head raises
        reason = " ".join(str(error).partition(". ")[0].split())
        raise InvalidRecords(reason[:100]) from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim != 1:
        raise UnreadableRecords(
            f"it holds {array.ndim} dimensions of {array.dtype}, expected one of integers"
        )
    if (end := array.offset + array.nbytes) != (size := path.stat().st_size):
        raise InvalidRecords(f"its array ends at byte {end:,}, the file at {size:,}")
    return array


def _mapped_plain(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise InvalidRecords(f"its {size:,} bytes are no multiple of {dtype}; check token_dtype")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)


def _check_type(dtype: np.dtype, path: Path, config: CorpusConfig) -> None:
    """Raise ConfigError if the type cannot hold the end, or each id of the vocabulary."""
    largest, tokenizer = np.iinfo(dtype).max, config.tokenizer
    for name, needed in (
        ("end_id", tokenizer.end_id),
        ("vocab_size", tokenizer.vocab_size - 1 if tokenizer.kind == "unknown" else 0),
    ):
        if needed > largest:
            raise ConfigError(
                f"{path} holds {dtype}, whose largest id is {largest:,}, but tokenizer.{name} is "
                f"{getattr(tokenizer, name):,}; correct it, or token_dtype"
            )


def _check_width(tokens: np.ndarray) -> None:
    """Raise UnreadableRecords for what are the halves of wider numbers, most likely."""
    first = tokens[: BLOCK - BLOCK % 4]
    for times in (4, 2):
        parts = first[: len(first) - len(first) % times].reshape(-1, times)
        if len(parts) < FEWEST_PARTS or (parts[:, 0] < SMALL).all():
            continue
        if (parts[:, 1:] < SMALL).all():
            wider = 8 * times * tokens.itemsize
            raise UnreadableRecords(
                f"{times - 1} of {times} numbers are below {SMALL}: they are {wider}-bit numbers "
                f"read as {tokens.dtype}; set token_dtype to uint{wider}"
            )


ZSTD_SUFFIX = ".zstd"
TEXT_COLUMN, BYTES_COLUMN, ARRAY_COLUMN = "str", "bytes", "ndarray"  # how MDS encodes them


def read_mds(source: SourceFile, config: CorpusConfig, follow: Callable[[Tell], None]) -> Records:
    """Yield a document for each sample; InvalidRecords if headers and contents do not agree."""
    with named_errors(source.path):
        memory = _contents(source)
    shard = _Shard(memory)
    expected = source.listed.samples if source.listed else None
    if expected not in (None, len(shard)):
        raise InvalidRecords(f"it has {len(shard)} samples, {expected} by {MDS_INDEX}")
    kind, done = shard.kind_of(config.text_field), 0
    follow(lambda: done * source.size // max(len(shard), 1))
    for number in range(len(shard)):
        done = number
        location = f"{source.name}:{number + 1}"
        sample = shard.sample(number)
        raw = sample[config.text_field]
        own = sample.get(config.id_field, b"") if shard.has_text(config.id_field) else b""
        yield _document(raw, kind, document_id(own, location), location, config)


def _document(
    raw: bytes, kind: str, name: str, location: str, config: CorpusConfig
) -> Document | Reject:
    if kind == TEXT_COLUMN:
        return document_of_bytes(raw, name, location, config)
    return document_of_tokens(_tokens(raw, kind, config), name, location, config)


def _tokens(raw: bytes, kind: str, config: CorpusConfig) -> np.ndarray:
    """Return the numbers of a column: an array of a stated type, or bytes, with `token_dtype`."""
    encoding, _, details = kind.partition(":")
    dtype, _, shape = details.partition(":")
    if encoding == BYTES_COLUMN and config.token_dtype:
        dtype = config.token_dtype
    elif encoding != ARRAY_COLUMN or dtype not in TOKEN_DTYPES:
        raise UnreadableRecords(
            f"column {config.text_field!r} holds {kind}, expected str, ndarray of integers, or "
            "bytes of ids with token_dtype"
        )
    elif "," in shape:
        raise UnreadableRecords(
            f"column {config.text_field!r} holds {kind}, expected one dimension"
        )
    elif not shape:  # it stands in front: number of dimensions and bytes of each, then these
        dimensions, width = (raw[0] >> 2, 1 << (raw[0] & 3)) if raw else (0, 0)
        if dimensions > 1:
            raise UnreadableRecords(
                f"column {config.text_field!r} holds arrays of {dimensions} dimensions"
            )
        raw = raw[1 + dimensions * width :]
    if len(raw) % np.dtype(dtype).itemsize:
        raise InvalidRecords(f"{len(raw)} bytes are no multiple of {dtype}; set token_dtype")
    tokens = np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"))
    if encoding == BYTES_COLUMN:
        _check_width(tokens)
    return tokens


def _contents(source: SourceFile) -> bytes | memoryview:
    with open_regular(source.path) as file:
        if not source.size:
            return b""
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for name, expected in source.listed.hashes if source.listed else ():
            if (found := _hash_of(content, name)) != expected:
                raise InvalidRecords(f"its {name} is {found}, expected {expected} by {MDS_INDEX}")
        name = source.path.name.lower()
        if not name.endswith(ZSTD_SUFFIX) and not is_compressed(name):
            return content
        unpacked = unpacked_zst(file) if name.endswith(ZSTD_SUFFIX) else decompressed(file, name)
        content = unpacked.read(LARGEST_SHARD_BYTES + 1)
        if len(content) > LARGEST_SHARD_BYTES:
            raise InvalidRecords(f"it unpacks to more than {LARGEST_SHARD_BYTES:,} bytes")
        return content


def _hash_of(content: memoryview, name: str) -> str:
    """Return a hash by the name that MDS has for it."""
    import xxhash

    try:
        if name in xxhash.algorithms_available:
            return getattr(xxhash, name)(content).hexdigest()
        return hashlib.new(name, content).hexdigest()
    except (ValueError, TypeError):
        raise InvalidRecords(f"{MDS_INDEX} has its {name!r}, which is no known hash") from None


@dataclass
class _Shard:
    """The samples of a shard: column -> bytes."""

    memory: bytes | memoryview

    def __post_init__(self) -> None:
        try:
            self._offsets, columns = read_head(self.memory)
        except InvalidShard as error:
            raise InvalidRecords(str(error)) from None
        self._kinds = {column.name: column.encoding for column in columns}
        self._sizes = {column.name: column.size for column in columns}
        if len(self._kinds) < len(columns):
            raise InvalidRecords("its column description names a column twice")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def kind_of(self, name: str) -> str:
        """Return how a column is encoded."""
        if name not in self._kinds:
            columns = ", ".join(map(str, self._kinds))
            raise UnreadableRecords(
                f"it has the columns {columns}, not {name!r}; name another field"
            )
        kind = self._kinds[name]
        if kind.partition(":")[0] == "pkl":
            raise UnreadableRecords(f"column {name!r} holds pickled values, which are never read")
        return kind

    def has_text(self, name: str) -> bool:
        return self._kinds.get(name) == TEXT_COLUMN

    def sample(self, number: int) -> dict[str, bytes]:
        """Return the bytes of each column of a sample."""
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        variable = [name for name, size in self._sizes.items() if size is None]
        head = start + 4 * len(variable)
        if head > end:
            raise InvalidRecords(f"sample {number} is too short")
        found = struct.unpack_from(f"<{len(variable)}I", self.memory, start)
        sizes = {**self._sizes, **dict(zip(variable, found, strict=True))}
        if head + sum(size or 0 for size in sizes.values()) != end:
            raise InvalidRecords(f"the sizes in the header of sample {number} do not add up")
        values = {}
        for name, size in sizes.items():
            values[name] = bytes(self.memory[head : head + (size or 0)])
            head += size or 0
        return values
