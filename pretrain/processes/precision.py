"""The precision of a run: chosen once, when it starts, and from then on one of its settings."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from pretrain.config.choices import Precision, PrecisionSetting, resolved_precision
from pretrain.config.resolve import with_precision
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World, any_rank, broadcast_value, raise_on_all_ranks
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)


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
    kept = resolved_precision(recorded, best)
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
