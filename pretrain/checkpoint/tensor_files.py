"""Safetensors files, laid out first, copied to host memory, then written and hashed in one pass.

The safetensors library reads them: the header's length (8 bytes, little-endian), the header (JSON:
type, shape and offsets of each tensor), then the tensors' bytes without gaps. The library's own
writer would copy everything once more, and a hash would read the file back. Here both happen on the
way to the disk, without the interpreter lock, so that the loop keeps training.
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
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return Layout(len(text).to_bytes(8, "little") + text, offsets, end)


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
    path: Path, layout: Layout, host: Tensor, between_blocks: Callable[[], None]
) -> dict[str, Any]:
    """Write and fsync the file; returns size and SHA-256. `between_blocks` may raise to cancel."""
    digest = hashlib.sha256()
    body = host[: layout.num_bytes].numpy().data
    with named_errors(path), open(path, "wb", opener=own_file) as file:
        for source in (memoryview(layout.header), body):
            for start in range(0, len(source), BLOCK_BYTES):
                between_blocks()
                block = source[start : start + BLOCK_BYTES]
                digest.update(block)
                file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": layout.file_bytes, "sha256": digest.hexdigest()}
