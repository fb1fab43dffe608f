"""The precision of a run: chosen once, when it starts, and from then on one of its settings.

Bitwise repeatable results on a GPU, where several operations are not so by themselves.

What remains outside of it: another device, library or number of ranks rounds differently, and NCCL
may choose another algorithm on other nodes. `docs/reliability.md` lists all of it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch.utils import deterministic

from pretrain.config.choices import Precision, PrecisionSetting
from pretrain.config.engine import Attention, attention_in
from pretrain.config.resolve import with_precision
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World, any_rank, broadcast_value, raise_on_all_ranks
from pretrain.kernels.triton.settings import unsupported_reason
from pretrain.kernels.triton.tiling import tiles_for
from pretrain.rundir.run_dir import RunDir

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
    if kernel == "atomic":
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


def with_precision_of_run(config: RunConfig, directory: Path, world: World) -> RunConfig:
    """Return the settings with a precision in place of `auto`. A collective.

    A run that exists keeps the precision it has recorded, on any device: other rounding from one
    step to the next is the user's decision. A new one gets bf16 if every rank's device has it.
    """
    best: Precision = "fp32" if any_rank(not has_bf16(world.device)) else "bf16"
    recorded: PrecisionSetting = "auto"
    with raise_on_all_ranks():  # settings that cannot be read are every rank's error
        if world.is_main and RunDir(directory).exists():
            recorded = RunDir.open(directory).config.engine.precision
    recorded = broadcast_value(recorded, str)
    kept = best if recorded == "auto" else recorded
    resolved = with_precision(config, kept)
    if world.is_main and resolved != config and kept != best:
        logger.info(
            "engine.precision=auto: %s, as the run has it, although %s suits this device",
            kept,
            best,
        )
    return resolved


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 faster than in fp32; few CPUs do."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
