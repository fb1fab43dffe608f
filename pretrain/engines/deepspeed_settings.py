"""What DeepSpeed is told, derived from a run's settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from data_pipeline.errors import ConfigError
from pretrain.config.run import RunConfig

# What DeepSpeed would do, and the engine does in its place.
OWN = {"optimizer": "optim.name and its settings", "scheduler": "optim.schedule"}


def deepspeed_config(run: RunConfig, world_size: int, accumulation_steps: int) -> dict[str, Any]:
    """DeepSpeed's JSON, derived from the run; `engine.deepspeed_extra` is merged last and may not contradict it."""
    derived: dict[str, Any] = {
        "train_batch_size": run.data.lanes,
        "train_micro_batch_size_per_gpu": run.data.lanes // (world_size * accumulation_steps),
        "gradient_accumulation_steps": accumulation_steps,
        # Without ZeRO in fp32 DeepSpeed clips but does not report the norm, so there the engine does both.
        "gradient_clipping": 0.0 if is_plain(run) else run.optim.clip_norm,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # it knows optimizers by their exact type only
        "zero_optimization": {
            "stage": run.engine.zero_stage,
            # On, it replaces torch.nn.functional.linear for the whole process and shifts bf16 results between stages.
            "memory_efficient_linear": False,
        },
    }
    if run.engine.offload_optimizer:
        derived["zero_optimization"]["offload_optimizer"] = {
            "device": "cpu",
            "pin_memory": torch.cuda.is_available(),
        }
        derived["zero_force_ds_cpu_optimizer"] = (
            False  # torch's fused AdamW is as fast there and needs no compiler
        )
    if run.engine.precision == "bf16":
        derived["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if run.engine.precision == "fp16":
        derived["fp16"] = {
            "enabled": True,
            "loss_scale": 1.0,
        }  # constant to DeepSpeed: `LossScaler` sets it
    if run.engine.precision != "fp32" and run.engine.zero_stage > 0:
        # Stage 0 cannot accumulate in another type than the weights'.
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
        derived["communication_data_type"] = "fp32"
    for key in OWN.keys() & run.engine.deepspeed_extra.keys():
        raise ConfigError(
            f"engine.deepspeed_extra.{key} would change nothing; use {OWN[key]} instead"
        )
    return _merged(derived, run.engine.deepspeed_extra, "engine.deepspeed_extra")


def checked(deepspeed: Any, config: dict[str, Any]) -> dict[str, Any]:
    """`config`, if DeepSpeed takes it; what it refuses of `engine.deepspeed_extra` is said in a line of ConfigError."""
    try:
        deepspeed.DeepSpeedConfig(copy.deepcopy(config))
    except (ValueError, AssertionError, deepspeed.DeepSpeedConfigError) as error:
        words = " ".join(str(error).split("For further information")[0].split())
        raise ConfigError(
            f"engine.deepspeed_extra: DeepSpeed refuses it: {words}; correct or remove it"
        ) from None
    return config


def is_plain(run: RunConfig) -> bool:
    """ZeRO 0 in fp32: DeepSpeed runs the optimizer as it is, without a wrapper of its own."""
    return run.engine.zero_stage == 0 and run.engine.precision == "fp32"


def _merged(derived: dict[str, Any], extra: Mapping[str, Any], where: str) -> dict[str, Any]:
    merged = dict(derived)
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value, f"{where}.{key}")
        elif key in merged and merged[key] != value:
            raise ConfigError(
                f"{where}.{key}={value!r} contradicts {merged[key]!r}, which follows from the run's settings; remove it"
            )
        else:
            merged[key] = value
    return merged
