"""Bitwise repeatable results on a GPU, where several operations are not so by themselves.

What remains outside of it: another device, library or number of ranks rounds differently, and NCCL
may choose another algorithm on other nodes. `docs/reliability.md` lists all of it.
"""

from __future__ import annotations

import logging
import os

import torch
from torch.utils import deterministic

from pretrain.config.attention_limits import Attention, attention_in
from pretrain.config.choices import sums_in_order
from pretrain.config.run import RunConfig
from pretrain.kernels.triton.settings import unsupported_reason
from pretrain.kernels.triton.tile_table import tiles_for

logger = logging.getLogger(__name__)

# Eight buffers of 4 MiB per stream: with them a matrix product takes the same path every time.
CUBLAS_WORKSPACE = ":4096:8"


def set_determinism(config: RunConfig, device: torch.device) -> None:
    """Let a GPU repeat its results bit by bit, unless the run asks for atomic sums.

    Call it before the first matrix product: cuBLAS reads its variable only then.
    """
    if device.type != "cuda":
        return
    kernel = config.engine.attention_kernel
    if not sums_in_order(kernel):
        logger.warning("not bitwise: engine.attention_kernel=%s sums in no fixed order", kernel)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else every new tensor would be filled first, a pass over memory for nothing.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def check_tiles(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if the fused kernels have a table of tiles that does not fit the GPU.

    Tiles decide how sums are rounded, so a run does not start with others than those meant for it.
    """
    if device.type != "cuda" or unsupported_reason(device):
        return
    kind, _ = attention_in(config.engine, config.model, on_gpu=True)
    if kind is Attention.FUSED:
        tiles_for(config.model.head_width, torch.cuda.get_device_capability(device))
