"""WebDataset shards: written by webdataset's own TarWriter, read by memory map.

A sample is one tar member `NUMBER-ID.tokens.npy`: stock readers return {"__key__": "NUMBER-ID",
"tokens.npy": array}. The id is percent-encoded because WebDataset ends a key at its first dot. The
tokens follow numpy's header unchanged. This is the only module that imports webdataset.
"""

import contextlib
import io
import mmap
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from data_pipeline.shards.mds import InvalidShard, ShardLayout
from foundation.files import atomic_write

SUFFIX = ".tar"
BLOCK_BYTES = tarfile.BLOCKSIZE
NAME_FIELD, SIZE_FIELD, CHECKSUM_FIELD = slice(0, 100), slice(124, 135), slice(148, 156)
TYPE_OFFSET = 156
MAGIC_FIELD, MAGIC = slice(257, 262), b"ustar"
FIELD = ".tokens.npy"
NUMBER_DIGITS = 8  # enough to number the documents of any shard
NUMPY_MAGIC = b"\x93NUMPY\x01\x00"
NUMPY_HEAD_BYTES = len(NUMPY_MAGIC) + 2  # magic, and the size of the text that follows
NUMPY_HEADER_BYTES = 128  # numpy pads it to a multiple of 64
LONGEST_NAME = 100  # bytes; the name of a member that is longer gets an extended header


def padded(size):  # type: ignore[no-untyped-def]
    """Return the bytes that contents of `size`, a number or an array, take up."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def sample_bytes(document_id: str, token_bytes: int) -> int:
    """Return how many bytes of a shard a document takes up."""
    name = _key(0, document_id) + FIELD
    name_bytes = BLOCK_BYTES + padded(len(name) + 16) if len(name) > LONGEST_NAME else 0
    return name_bytes + BLOCK_BYTES + padded(NUMPY_HEADER_BYTES + token_bytes)


def write_shard(
    path: Path, documents: Sequence[tuple[str, np.ndarray]], scratch: Path
) -> dict[str, Any]:
    """Write (id, tokens) pairs as one shard, atomically; it needs no entry in an index."""
    from webdataset.writer import TarWriter

    shutil.rmtree(scratch, ignore_errors=True)
    with atomic_write(path) as file:
        # Constant times and owners: the same documents give the same bytes.
        writer = TarWriter(file, mtime=0, format="PAX_FORMAT")
        try:
            for number, (document_id, tokens) in enumerate(documents):
                writer.write({"__key__": _key(number, document_id), FIELD[1:]: tokens})
            writer.close()
        finally:
            # After an error, tarfile's stream would write its buffer when it is garbage collected,
            # but by then the file is closed.
            with contextlib.suppress(OSError):
                writer.tarstream.fileobj.close()
    return {}


def _key(number: int, document_id: str) -> str:
    return f"{number:0{NUMBER_DIGITS}d}-{quote(document_id, safe='').replace('.', '%2E')}"


def read_layout(memory: mmap.mmap, dtype: str) -> ShardLayout:
    """Find every document by its headers alone; InvalidShard if they do not fit the file.

    Shapes: H headers, D documents. A tar consists of blocks of 512 bytes.
    """
    if len(memory) % BLOCK_BYTES:
        raise InvalidShard(f"its {len(memory)} bytes are not a whole number of blocks")
    blocks = np.frombuffer(memory, np.uint8).reshape(-1, BLOCK_BYTES)
    headers_H, sizes_H = _find_headers(blocks)
    # The other headers are extended ones: each holds the long name of the next member.
    is_member_H = blocks[headers_H, TYPE_OFFSET] == ord("0")
    members_D = headers_H[is_member_H]
    long_names = {
        int(is_member_H[:index].sum()): int(headers_H[index])
        for index in np.flatnonzero(~is_member_H)
    }
    if not len(members_D):
        raise InvalidShard("it contains no documents")

    def document_id(document: int) -> str:
        if document in long_names:
            start, end = long_names[document] * BLOCK_BYTES, members_D[document] + 1
            headers = io.BytesIO(memory[start : end * BLOCK_BYTES])
            try:
                with tarfile.open(fileobj=headers, mode="r:", errors="replace") as archive:
                    member = archive.next()
            except (tarfile.TarError, ValueError, IndexError, OverflowError) as error:
                raise InvalidShard(str(error)) from None
            name = member.name if member else ""
        else:
            field = blocks[members_D[document], NAME_FIELD].tobytes()
            name = field.rstrip(b"\0").decode(errors="replace")
        if not name.endswith(FIELD):
            raise InvalidShard(f"a document has no name that ends in {FIELD}")
        return unquote(name.removesuffix(FIELD)[NUMBER_DIGITS + 1 :])

    sizes_D = sizes_H[is_member_H]
    token_offsets_D, lengths_D = _locate_tokens(blocks, members_D + 1, sizes_D, np.dtype(dtype))
    return ShardLayout(token_offsets_D, lengths_D, document_id)


def _find_headers(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks that are headers and the bytes of contents that each declares.

    InvalidShard unless they fill the file. Headers have a magic string at a fixed offset, so all
    are found by one comparison. Contents may look like a header by chance: if the sizes do not
    lead from each header to the next, the chain of headers is followed one by one.
    """
    looks_like_header = (blocks[:, MAGIC_FIELD] == np.frombuffer(MAGIC, np.uint8)).all(1)
    headers_H = np.flatnonzero(looks_like_header)
    sizes_H = _octal(blocks[headers_H, SIZE_FIELD])
    next_H = headers_H + 1 + padded(sizes_H) // BLOCK_BYTES
    if not len(headers_H) or headers_H[0] or (next_H[:-1] != headers_H[1:]).any():
        chain = _follow(headers_H.tolist(), next_H.tolist())
        headers_H, sizes_H, next_H = headers_H[chain], sizes_H[chain], next_H[chain]
    if (sizes_H < 0).any():
        raise InvalidShard("a header has no size in octal digits")
    end = int(next_H[-1]) if len(next_H) else 0
    if end + 2 > len(blocks) or blocks[end:].any():
        raise InvalidShard(
            f"its {blocks.size} bytes have no end-of-archive marker after {len(headers_H)} headers"
        )
    fields = blocks[headers_H]
    stored_H = _octal(fields[:, CHECKSUM_FIELD][:, :6])
    fields[:, CHECKSUM_FIELD] = ord(" ")
    if (wrong := np.flatnonzero(fields.sum(1, dtype=np.uint32) != stored_H)).size:
        raise InvalidShard(
            f"the checksum of the header at byte {headers_H[wrong[0]] * BLOCK_BYTES} is wrong"
        )
    return headers_H, sizes_H


def _follow(candidates: list[int], following: list[int]) -> list[int]:
    """Return the indices of the candidates that can be reached from the first block."""
    index_of = {block: index for index, block in enumerate(candidates)}
    chain, block = [], 0
    while block in index_of:
        chain.append(index_of[block])
        block = following[chain[-1]]
    return chain


def _octal(digits: np.ndarray) -> np.ndarray:
    """Return the numbers written in octal digits, [N, digits] -> [N]; -1 for anything else."""
    powers = 8 ** np.arange(digits.shape[1] - 1, -1, -1, dtype=np.int64)
    values = digits.astype(np.int64) - ord("0")
    return np.where(((values < 0) | (values > 7)).any(1), -1, values @ powers)


def _locate_tokens(
    blocks: np.ndarray, first_blocks_D: np.ndarray, sizes_D: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte offset of each array's tokens, and how many tokens it has."""
    little_endian = dtype.newbyteorder("<").str
    text = f"{{'descr': '{little_endian}', 'fortran_order': False, 'shape': (".encode()
    heads = blocks[first_blocks_D, : NUMPY_HEAD_BYTES + len(text)]
    is_array = (heads[:, : len(NUMPY_MAGIC)] == np.frombuffer(NUMPY_MAGIC, np.uint8)).all(1)
    is_array &= (heads[:, NUMPY_HEAD_BYTES:] == np.frombuffer(text, np.uint8)).all(1)
    if not is_array.all():
        offset = int(first_blocks_D[np.flatnonzero(~is_array)[0]]) * BLOCK_BYTES
        raise InvalidShard(f"byte {offset} does not start a one-dimensional array of {dtype}")
    text_sizes = heads[:, len(NUMPY_MAGIC) : NUMPY_HEAD_BYTES].astype(np.int64)
    header_bytes_D = NUMPY_HEAD_BYTES + text_sizes @ np.array([1, 256])
    value_bytes_D = sizes_D - header_bytes_D
    if (value_bytes_D <= 0).any() or (value_bytes_D % dtype.itemsize).any():
        raise InvalidShard("the sizes of its token arrays are impossible")
    return first_blocks_D * BLOCK_BYTES + header_bytes_D, value_bytes_D // dtype.itemsize
