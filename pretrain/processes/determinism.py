"""Bitwise repeatable results on a GPU, where several operations are not so by themselves.

What remains outside of it: another device, library or number of ranks rounds differently, and NCCL
may choose another algorithm on other nodes. `docs/reliability.md` lists all of it.
"""

from __future__ import annotations

import logging
import os

import torch
from torch.utils import deterministic

from pretrain.config.choices import kernel_traits
from pretrain.config.run import RunConfig

logger = logging.getLogger(__name__)

# Two buffers of 4 MiB per stream: with them a matrix product takes the same path every time.
CUBLAS_WORKSPACE = ":4096:8"


def set_determinism(config: RunConfig, device: torch.device) -> None:
    """Let a GPU repeat its results bit by bit, unless the run asks for atomic sums.

    Call it before the first matrix product: cuBLAS reads its variable only then.
    """
    if device.type != "cuda":
        return
    kernel = config.engine.attention_kernel
    if not kernel_traits(kernel).is_bitwise:
        logger.warning("not bitwise: engine.attention_kernel=%s sums in no fixed order", kernel)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else every new tensor would be filled first, a pass over memory for nothing.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
