"""The tokens of each document of a shard, in a file of its own: SHARD.lengths.

A lane's share starts at a document, so the plan needs the lengths of the documents of two shards
per lane, but not the shards themselves. The file is about a thousandth of its shard:

    8 bytes      MAGIC
    32 bytes     SHA-256 of the shard
    32 bytes     SHA-256 of what follows
    4 bytes each tokens of the documents in the order of storage, little endian

The build writes it, and the manifest has its SHA-256.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_pipeline.corpora.manifest import ShardInfo, lengths_name
from foundation.errors import DataError
from foundation.files import LARGEST_READ_BYTES, atomic_write, read_regular
from foundation.paths import path_below

MAGIC = b"XLLENS01"
HASH_BYTES = 32
HEADER_BYTES = len(MAGIC) + 2 * HASH_BYTES
LENGTH_TYPE = np.dtype("<u4")


class InvalidLengths(Exception):
    """A file of lengths does not fit its shard; the message says how."""


def lengths_content(shard_sha256: str, lengths_D: Sequence[int] | np.ndarray) -> bytes:
    """Return the file of the lengths of a shard's documents."""
    values = np.asarray(lengths_D).astype(LENGTH_TYPE).tobytes()
    return MAGIC + bytes.fromhex(shard_sha256) + hashlib.sha256(values).digest() + values


def write_lengths(shard: Path, sha256: str, lengths_D: Sequence[int]) -> str:
    """Write the file of a shard's lengths beside it; return its SHA-256."""
    content = lengths_content(sha256, lengths_D)
    with atomic_write(shard.with_name(lengths_name(shard.name))) as file:
        file.write(content)
    return hashlib.sha256(content).hexdigest()


def lengths_bytes(info: ShardInfo) -> int:
    """Return the size of the file of lengths of a shard."""
    return HEADER_BYTES + LENGTH_TYPE.itemsize * info.documents


def files_of(info: ShardInfo) -> dict[str, int]:
    """Return name -> size of the files that the manifest lists for a shard."""
    return {info.path: info.size, lengths_name(info.path): lengths_bytes(info)}


def lengths_in(content: bytes, info: ShardInfo) -> np.ndarray:
    """Return the tokens of each document, int64 [D]; InvalidLengths unless they are the shard's."""
    if len(content) != lengths_bytes(info):
        raise InvalidLengths(f"it has {len(content)} bytes, expected {lengths_bytes(info)}")
    if (digest := hashlib.sha256(content).hexdigest()) != info.lengths:
        raise InvalidLengths(
            f"its SHA-256 is {digest[:16]}, the manifest expects {info.lengths[:16]}"
        )
    head, values = content[:HEADER_BYTES], content[HEADER_BYTES:]
    expected = MAGIC + bytes.fromhex(info.sha256) + hashlib.sha256(values).digest()
    if head != expected:
        raise InvalidLengths("its header does not fit its shard and contents")
    lengths_D = np.frombuffer(values, LENGTH_TYPE).astype(np.int64)
    totals = int(lengths_D.min()), int(lengths_D.max()), int(lengths_D.sum())
    if totals[0] < 1 or totals[1:] != (info.longest_document, info.tokens):
        raise InvalidLengths(
            f"its documents have {totals[0]} to {totals[1]} tokens and {totals[2]} in all, the "
            f"manifest expects up to {info.longest_document} and {info.tokens} in all"
        )
    return lengths_D


def lengths_file(info: ShardInfo) -> ShardInfo:
    """Return the entry of a shard's file of lengths, which is fetched and kept like a shard."""
    name = lengths_name(info.path)
    return replace(info, path=name, size=lengths_bytes(info), sha256=info.lengths)


def lengths_beside(directory: Path, info: ShardInfo) -> np.ndarray:
    """Return the lengths of a shard in `directory`; DataError if missing or not the shard's."""
    path = path_below(directory, lengths_name(info.path))
    try:
        return lengths_in(read_regular(path, min(lengths_bytes(info), LARGEST_READ_BYTES)), info)
    except FileNotFoundError:
        problem = "is missing"
    except (InvalidLengths, ValueError) as error:
        problem = f"is corrupted: {error}"
    raise DataError(f"{path} {problem}; restore it or build the corpus again")


def check_lengths_of(info: ShardInfo, lengths_D: np.ndarray, shard: str) -> None:
    """Raise DataError unless the documents of an opened shard have the lengths that are listed."""
    content = lengths_content(info.sha256, lengths_D)
    if (digest := hashlib.sha256(content).hexdigest()) != info.lengths:
        raise DataError(
            f"the lengths of the documents of shard {shard} hash to {digest[:16]}, the manifest "
            f"expects {info.lengths[:16]}; build the corpus again"
        )
