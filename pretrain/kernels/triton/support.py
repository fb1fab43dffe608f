"""What the fused kernel takes. Importable without triton, so that a caller can ask before it imports the kernel."""

from __future__ import annotations

import importlib.util
import os

import torch

LARGEST_HEAD = 128
DTYPES = (torch.bfloat16, torch.float16)
CAPABILITIES = (
    (8, 0),
    (9, 0),
    (10, 0),
)  # whose shared memory holds the tiles; compiled offline for the first two


def interprets_kernels() -> bool:
    """Whether triton runs kernels in its interpreter, on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def unsupported_reason(device: torch.device, dtype: torch.dtype, head_width: int) -> str | None:
    """Why the fused kernel cannot serve attention of this kind, or None when it can."""
    if head_width > LARGEST_HEAD:
        return f"the head width is {head_width}; the fused kernel takes at most {LARGEST_HEAD}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if interprets_kernels():
        return (
            None if dtype in (*DTYPES, torch.float32) else f"the interpreter does not take {dtype}"
        )
    if device.type != "cuda" or torch.version.hip:
        return f"the fused kernel needs an NVIDIA GPU; the tensors are on '{device}'"
    if dtype not in DTYPES:
        return f"the tensors are {dtype}; the fused kernel takes bfloat16 and float16"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        major, minor = capability
        return f"the GPU has compute capability {major}.{minor}; the kernel's tiles are chosen for {known}"
    return None
