"""Safetensors files, laid out first, copied to host memory, then written and hashed in one pass.

The safetensors library reads them: the header's length (8 bytes, little-endian), the header (JSON:
type, shape and offsets of each tensor), then the tensors' bytes without gaps. The library's own
writer would copy everything once more, and a hash would read the file back. Here both happen on the
way to the disk, without the interpreter lock, so that the loop keeps training.

Several ranks of a node can write one file: all know its header beforehand, each writes its part.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.files import named_errors, own_file

BLOCK_BYTES = 1 << 24
ALIGNMENT = 8
PART_ALIGNMENT = 4096
TYPE_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}

# Each tensor as pieces that follow each other along the first dimension.
Pieces = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Layout:
    """The file's header, and the offset of each tensor's bytes from the header's end."""

    header: bytes
    offsets: dict[str, int]
    num_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.num_bytes


@dataclass(frozen=True)
class FilePart:
    """The part of a file that one rank writes: a header or none, its tensors' bytes, zeros."""

    header: bytes
    start: int
    num_bytes: int
    padding: int
    file_bytes: int

    @property
    def part_bytes(self) -> int:
        return len(self.header) + self.num_bytes + self.padding


def whole_file(layout: Layout) -> FilePart:
    """The part of a rank that writes the file alone."""
    return FilePart(layout.header, 0, layout.num_bytes, 0, layout.file_bytes)


def part_of_file(headers: Mapping[int, bytes], rank: int) -> FilePart:
    """The part of `rank` in a file of the ranks whose own tensors the `headers` describe.

    A tensor's key is RANK|NAME. Parts follow each other in the headers' order, the first one with
    the file's header. Each ends with a multiple of `PART_ALIGNMENT`, so that no two ranks write to
    the same page: what fills it is a tensor, because the library takes no file with gaps.
    """
    entries: dict[str, dict[str, Any]] = {}
    ranges: dict[int, tuple[int, int, int]] = {}
    start = 0
    for each, header in headers.items():
        end = start
        for name, entry in json.loads(header[8:]).items():
            low, high = (start + offset for offset in entry["data_offsets"])
            entries[f"{each}|{name}"] = {**entry, "data_offsets": [low, high]}
            end = max(end, high)
        padding = -end % PART_ALIGNMENT
        if padding:
            filled = {"dtype": "U8", "shape": [padding], "data_offsets": [end, end + padding]}
            entries[f"{each}|padding"] = filled
        ranges[each] = (start, end - start, padding)
        start = end + padding
    header = _header_of(entries, PART_ALIGNMENT)
    file_bytes = len(header) + start
    start, num_bytes, padding = ranges[rank]
    if rank == next(iter(headers)):
        return FilePart(header, 0, num_bytes, padding, file_bytes)
    return FilePart(b"", len(header) + start, num_bytes, padding, file_bytes)


def layout_of(tensors: Pieces) -> Layout:
    """Lay out the widest types first, so that every tensor is aligned; by name within a type."""
    entries: dict[str, dict[str, Any]] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name)):
        pieces = tensors[name]
        shape = [sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]]
        start, end = end, end + math.prod(shape) * pieces[0].element_size()
        offsets[name] = start
        entries[name] = {
            "dtype": TYPE_NAMES[pieces[0].dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    return Layout(_header_of(entries, ALIGNMENT), offsets, end)


def _header_of(entries: Mapping[str, Any], alignment: int) -> bytes:
    """The bytes of a file before its tensors, a multiple of `alignment`."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % alignment)
    return len(text).to_bytes(8, "little") + text


def copy_to_host(tensors: Pieces, layout: Layout, host: Tensor) -> None:
    """Copy every piece to its offset in `host`, a buffer of bytes; does not wait for a device."""
    for name, pieces in tensors.items():
        start = layout.offsets[name]
        for piece in pieces:
            end = start + piece.numel() * piece.element_size()
            view = host[start:end].view(piece.dtype).view(piece.shape)
            view.copy_(piece.detach(), non_blocking=True)
            start = end


def write_file(
    path: Path, part: FilePart, host: Tensor, between_blocks: Callable[[], None]
) -> dict[str, Any]:
    """Write and fsync a part of the file; returns start, size and SHA-256 of the part.

    `between_blocks` may raise to cancel.
    """
    digest = hashlib.sha256()
    body = host[: part.num_bytes].numpy().data
    with named_errors(path), open(path, "r+b", opener=_own_new_file) as file:
        file.seek(part.start)
        for source in (memoryview(part.header), body, memoryview(bytes(part.padding))):
            for start in range(0, len(source), BLOCK_BYTES):
                between_blocks()
                block = source[start : start + BLOCK_BYTES]
                digest.update(block)
                file.write(block)
        file.truncate(part.file_bytes)  # the same on all ranks: cuts what a former try has left
        file.flush()
        os.fsync(file.fileno())
    return {"start": part.start, "bytes": part.part_bytes, "sha256": digest.hexdigest()}


def _own_new_file(path: str, flags: int) -> int:
    """Not truncated: other ranks may have written their parts."""
    return own_file(path, flags | os.O_CREAT)
