"""Records of MDS shards that others wrote, such as LLM Foundry: text, or arrays of tokens.

Layout: data_pipeline/shards/mds.py. Only the columns that the settings name are used; one that
holds pickled values is refused.
"""

import hashlib
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data_pipeline.builder.compression import (
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
from data_pipeline.builder.token_files import check_width
from data_pipeline.config import LARGEST_SHARD_BYTES, TOKEN_DTYPES, CorpusConfig
from data_pipeline.shards.mds import InvalidShard, read_head
from foundation.files import named_errors, open_regular

ZSTD_SUFFIX = ".zstd"
TEXT_COLUMN, BYTES_COLUMN, ARRAY_COLUMN = "str", "bytes", "ndarray"  # encodings of MDS


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
    """Return a sample's numbers: an array, whose type is in `kind`, or bytes of `token_dtype`."""
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
    elif not shape:  # the array begins with its shape: number and width of dimensions, then each
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
        check_width(tokens, config)
    return tokens


def _contents(source: SourceFile) -> bytes | memoryview:
    with open_regular(source.path) as file:
        if not source.size:
            return b""
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        for name, expected in source.listed.hashes if source.listed else ():
            if (digest := _hash_of(content, name)) != expected:
                raise InvalidRecords(f"its {name} is {digest}, expected {expected} by {MDS_INDEX}")
        name = source.path.name.lower()
        if not name.endswith(ZSTD_SUFFIX) and not is_compressed(name):
            return content
        unpacked = unpacked_zst(file) if name.endswith(ZSTD_SUFFIX) else decompressed(file, name)
        content = unpacked.read(LARGEST_SHARD_BYTES + 1)
        if len(content) > LARGEST_SHARD_BYTES:
            raise InvalidRecords(f"it unpacks to more than {LARGEST_SHARD_BYTES:,} bytes")
        return content


def _hash_of(content: memoryview, name: str) -> str:
    """Return the hash of the content by the algorithm that MDS calls `name`."""
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
        stated = struct.unpack_from(f"<{len(variable)}I", self.memory, start)
        sizes = {**self._sizes, **dict(zip(variable, stated, strict=True))}
        if head + sum(size or 0 for size in sizes.values()) != end:
            raise InvalidRecords(f"the sizes in the header of sample {number} do not add up")
        values = {}
        for name, size in sizes.items():
            values[name] = bytes(self.memory[head : head + (size or 0)])
            head += size or 0
        return values
