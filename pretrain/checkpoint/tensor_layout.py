"""The layout of a safetensors file, and the host memory that its tensors are copied to.

The safetensors library reads the files: the header's length (8 bytes, little-endian), the header
(JSON: type, shape and offsets of each tensor), then the tensors' bytes without gaps. The library's
own writer would copy everything once more, and a hash would read the file back. Our writer hashes
the bytes on their way to the disk, without the interpreter lock, so that the loop keeps training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundation.typed_values import json_text

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
SplitTensors = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Layout:
    """The file's header, and the offset of each tensor's bytes from the header's end."""

    header: bytes
    offsets: dict[str, int]
    num_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.num_bytes


def lay_out(tensors: SplitTensors) -> Layout:
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
    text = json_text(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return Layout(len(text).to_bytes(8, "little") + text, offsets, end)


def copy_to_host(tensors: SplitTensors, layout: Layout, host: Tensor) -> None:
    """Copy every piece to its offset in `host`, a buffer of bytes; does not wait for a device."""
    for name, pieces in tensors.items():
        start = layout.offsets[name]
        for piece in pieces:
            end = start + piece.numel() * piece.element_size()
            view = host[start:end].view(piece.dtype).view(piece.shape)
            view.copy_(piece.detach(), non_blocking=True)
            start = end


class HostBuffer:
    """Host memory that saves reuse: to allocate and pin it takes longer than to fill it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def with_bytes(self, num_bytes: int) -> Tensor:
        """Return a buffer of at least `num_bytes`: the last call's if it is large enough."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(0)  # frees the old one first: both might not fit
            pinned = self.device.type == "cuda"
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer
