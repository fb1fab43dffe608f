"""WebDataset shards: written by webdataset's own TarWriter, read by memory map. The only module that imports it.

A sample is one tar member `NUMBER-ID.tokens.npy`, so stock readers give {"__key__": "NUMBER-ID", "tokens.npy": array}.
The id is percent-encoded: WebDataset ends a key at its first dot. The tokens follow numpy's header as they are.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from data_pipeline.files import replacing
from data_pipeline.shard_layout import ShardDamage, ShardLayout
from data_pipeline.tar import BLOCK_BYTES, CHECKSUM_FIELD, SIZE_FIELD, TYPE_OFFSET, padded, pax_path

FIELD = ".tokens.npy"
NUMBER_DIGITS = 8  # every shard has far fewer documents
NUMPY_MAGIC = b"\x93NUMPY\x01\x00"
NUMPY_HEAD_BYTES = len(NUMPY_MAGIC) + 2  # the size of the text that follows
NUMPY_HEADER_BYTES = 128  # numpy pads it to a multiple of 64
LONGEST_NAME = 100  # a longer one gets a header of its own


def sample_bytes(document_id: str, token_bytes: int) -> int:
    """How much of a shard a document takes up."""
    name = _key(0, document_id) + FIELD
    name_bytes = BLOCK_BYTES + padded(len(name) + 16) if len(name) > LONGEST_NAME else 0
    return name_bytes + BLOCK_BYTES + padded(NUMPY_HEADER_BYTES + token_bytes)


def write_shard(path: Path, documents: Sequence[tuple[str, np.ndarray]], scratch: Path) -> dict[str, Any]:
    """Write (id, tokens) pairs as one shard that is at `path` whole or not at all; it needs no entry in an index."""
    from webdataset.writer import TarWriter

    shutil.rmtree(scratch, ignore_errors=True)
    with replacing(path) as file:
        # Constant times and names of owners: the same documents give the same bytes.
        writer = TarWriter(file, mtime=0, format="PAX_FORMAT")
        for number, (document_id, tokens) in enumerate(documents):
            writer.write({"__key__": _key(number, document_id), FIELD[1:]: tokens})
        writer.close()
    return {}


def _key(number: int, document_id: str) -> str:
    return f"{number:0{NUMBER_DIGITS}d}-{quote(document_id, safe='').replace('.', '%2E')}"


def read_layout(memory: mmap.mmap, dtype: str) -> ShardLayout:
    """Find every document by its headers alone; ShardDamage if they do not describe the whole file."""
    raw = np.frombuffer(memory, np.uint8)
    headers = _header_places(memory)
    _check_sums(raw, headers)
    is_member = raw[headers + TYPE_OFFSET] == ord("0")
    members = headers[is_member]
    long_names = {int(np.sum(is_member[:place])): int(headers[place]) for place in np.flatnonzero(~is_member)}
    if not len(members):
        raise ShardDamage("it holds no documents")

    def document_id(document: int) -> str:
        if document in long_names:
            name = pax_path(memory, long_names[document])
        else:
            begin = int(members[document])
            name = memory[begin : begin + 100].rstrip(b"\0").decode(errors="replace")
        return unquote(name.removesuffix(FIELD)[NUMBER_DIGITS + 1 :])

    return ShardLayout(*_locate_tokens(raw, members, _sizes(raw, members), np.dtype(dtype)), document_id)


def _header_places(memory: mmap.mmap) -> np.ndarray:
    """Byte offsets of all header blocks up to the two empty ones at the end."""
    places, place, end = [], 0, len(memory)
    low, high = SIZE_FIELD.start, SIZE_FIELD.stop
    try:
        while place < end and memory[place]:
            places.append(place)
            # The loop that costs time: sizes can only be followed one after the other.
            place += BLOCK_BYTES + padded(int(memory[place + low : place + high], 8))
    except ValueError:
        raise ShardDamage(f"the header at byte {place} has no size") from None
    if place + 2 * BLOCK_BYTES > end or any(memory[place:]):
        raise ShardDamage(f"its {end} bytes do not end as a tar does behind {len(places)} members")
    return np.array(places, np.int64)


def _check_sums(raw: np.ndarray, headers: np.ndarray) -> None:
    blocks = raw[headers[:, None] + np.arange(BLOCK_BYTES)]
    field = blocks[:, CHECKSUM_FIELD]
    sums = blocks.sum(1, dtype=np.int64) - field.sum(1, dtype=np.int64) + field.shape[1] * ord(" ")
    stored = _octal(field[:, :6])
    if (wrong := np.flatnonzero(sums != stored)).size:
        raise ShardDamage(f"the checksum of the header at byte {headers[wrong[0]]} is wrong")


def _sizes(raw: np.ndarray, members: np.ndarray) -> np.ndarray:
    return _octal(raw[members[:, None] + np.arange(SIZE_FIELD.start, SIZE_FIELD.stop)])


def _octal(digits: np.ndarray) -> np.ndarray:
    """Numbers out of their octal digits, [N, digits]."""
    places = 8 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    return (digits.astype(np.int64) - ord("0")) @ places


def _locate_tokens(
    raw: np.ndarray, members: np.ndarray, sizes: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Byte offset and number of the tokens of each member."""
    begins = members + BLOCK_BYTES
    text = f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': (".encode()
    if (sizes < NUMPY_HEAD_BYTES + len(text)).any():
        raise ShardDamage("a document is too short for an array")
    heads = raw[begins[:, None] + np.arange(NUMPY_HEAD_BYTES + len(text))]
    is_as_expected = (heads[:, : len(NUMPY_MAGIC)] == np.frombuffer(NUMPY_MAGIC, np.uint8)).all(1)
    is_as_expected &= (heads[:, NUMPY_HEAD_BYTES:] == np.frombuffer(text, np.uint8)).all(1)
    if not is_as_expected.all():
        place = int(begins[np.flatnonzero(~is_as_expected)[0]])
        raise ShardDamage(f"what lies at byte {place} is no array of {dtype} with one dimension")
    text_sizes = heads[:, len(NUMPY_MAGIC) : NUMPY_HEAD_BYTES].astype(np.int64) @ np.array([1, 256])
    value_bytes = sizes - NUMPY_HEAD_BYTES - text_sizes
    if (value_bytes <= 0).any() or (value_bytes % dtype.itemsize).any():
        raise ShardDamage("the sizes of its token arrays are impossible")
    return begins + NUMPY_HEAD_BYTES + text_sizes, value_bytes // dtype.itemsize
