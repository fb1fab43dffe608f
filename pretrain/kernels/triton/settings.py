"""What the fused kernels support, and the variants of their code.

This module does not import triton, so that a caller can ask before it imports the kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = (torch.bfloat16, torch.float16)
# GPUs whose shared memory holds the tiles; the kernels are compiled offline for the first two.
CAPABILITIES = ((8, 0), (9, 0), (10, 0))
DROPOUT_LEVELS = 1 << 16  # probabilities are multiples of 1/65536, as in pretrain.model.dropout


def interprets_kernels() -> bool:
    """Return whether triton runs kernels in its interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


@functools.cache
def has_triton() -> bool:
    """Return whether triton is installed; importing it takes a second."""
    return importlib.util.find_spec("triton") is not None


def unsupported_reason(device: torch.device) -> str | None:
    """Return why no fused kernel runs on such a device, or None if it does."""
    if not has_triton():
        return "triton is not installed"
    if interprets_kernels():
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"it needs an NVIDIA GPU; the tensors are on '{device}'"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        major, minor = capability
        return f"the GPU has compute capability {major}.{minor}; it supports {known}"
    return missing_for_compiling()


@functools.cache
def missing_for_compiling() -> str | None:
    """Return what triton lacks to compile its launchers when they first run, or None.

    It looks for CC, then gcc and clang, and builds against this Python's headers.
    """
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler, which triton needs; install gcc or clang, or set CC"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"{header} is missing, which triton needs; install Python's headers (python3-dev)"
    return None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel's compile-time constants, in one object that all of its functions take."""

    num_heads: int
    num_groups: int  # of heads that share a key and value
    head_width: int
    key_row: int  # elements from one key of a lane to the next
    value_row: int
    rows: int
    columns: int
    has_position: bool
    has_starts: bool  # documents are isolated
    has_distance_bias: bool
    has_sinks: bool  # in the softmax's denominators
    drop_threshold: int  # of DROPOUT_LEVELS
    adds_positions: bool  # in the kernel of the queries' gradient
    heads_per_program: int  # of a group, in the kernel of the keys' gradient
    precision: str  # of products of float32; "ieee" or "tf32"

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def padded_width(self) -> int:
        """The head width padded to a power of two, at least 16 for the tensor cores."""
        return max(16, 1 << (self.head_width - 1).bit_length())

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_width)

    @property
    def scale_log2(self) -> float:
        return self.scale * math.log2(math.e)

    @property
    def keep_scale(self) -> float:
        return DROPOUT_LEVELS / (DROPOUT_LEVELS - self.drop_threshold)
