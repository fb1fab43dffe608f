"""Safetensors files in one pass: laid out first, copied to host memory, then written and hashed block by block.

The format is that of the safetensors library, which reads them: the header's length (8 bytes, little-endian), the
header (JSON: type, shape and place of each tensor), then the tensors' bytes without gaps. Its own writer takes another
copy of everything, and hashing would read the file back; here both happen on the way to the disk, without the
interpreter's lock, so that a thread can do it while the loop goes on.
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

from data_pipeline.files import named_errors

BLOCK_BYTES = 1 << 24
ALIGNMENT = 8
TYPE_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}

# A tensor as it lies: pieces that follow each other along the first dimension.
Pieces = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Layout:
    """Where each tensor's bytes go, counted from the header's end, and that header."""

    header: bytes
    places: dict[str, int]
    num_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.num_bytes


def layout_of(tensors: Pieces) -> Layout:
    """The widest types first, so that every tensor lies aligned; by name within a type."""
    entries: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name)):
        pieces = tensors[name]
        shape = [sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]]
        begin, end = end, end + math.prod(shape) * pieces[0].element_size()
        places[name] = begin
        entries[name] = {
            "dtype": TYPE_NAMES[pieces[0].dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return Layout(len(text).to_bytes(8, "little") + text, places, end)


def copy_to_host(tensors: Pieces, layout: Layout, host: Tensor) -> None:
    """Copy every piece to its place in `host`, bytes in host memory; does not wait for copies from a device."""
    for name, pieces in tensors.items():
        begin = layout.places[name]
        for piece in pieces:
            end = begin + piece.numel() * piece.element_size()
            host[begin:end].view(piece.dtype).view(piece.shape).copy_(
                piece.detach(), non_blocking=True
            )
            begin = end


def write_file(
    path: Path, layout: Layout, host: Tensor, between_blocks: Callable[[], None]
) -> dict[str, Any]:
    """Write and sync the file; returns its size and SHA-256. `between_blocks` may raise to end it early."""
    digest = hashlib.sha256()
    body = host[: layout.num_bytes].numpy().data
    with named_errors(path), open(path, "wb") as file:
        for source in (memoryview(layout.header), body):
            for begin in range(0, len(source), BLOCK_BYTES):
                between_blocks()
                block = source[begin : begin + BLOCK_BYTES]
                digest.update(block)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": layout.file_bytes, "sha256": digest.hexdigest()}
