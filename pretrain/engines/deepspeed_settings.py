"""DeepSpeed's settings (its JSON), derived from those of the run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from data_pipeline.errors import ConfigError
from data_pipeline.setting_fields import assert_never
from pretrain.config.choices import precision_traits
from pretrain.config.run import RunConfig
from pretrain.costs.flops import parameters_of
from pretrain.costs.zero_buffers import bucket_elements, overlaps_reduction

# DeepSpeed ignores these sections when it is given an optimizer; the value is what to use instead.
UNUSED_SECTIONS = {"optimizer": "optim.name and its settings", "scheduler": "optim.schedule"}


def deepspeed_settings(
    run: RunConfig, world_size: int, accumulation_steps: int, on_gpu: bool
) -> dict[str, Any]:
    """Return DeepSpeed's settings; `engine.deepspeed_extra` is merged in (no contradictions)."""
    # Ranks that share lanes count theirs once each, for DeepSpeed: its numbers only have to fit.
    batch = run.data.lanes * run.engine.sequence_ranks
    derived: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch // (world_size * accumulation_steps),
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": 0.0 if is_unwrapped(run) else run.optim.clip_norm,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # it knows optimizers by their exact type only
        "zero_optimization": {
            "stage": run.engine.zero_stage,
            # True replaces torch.nn.functional.linear for the whole process and shifts bf16 results
            # between stages.
            "memory_efficient_linear": False,
        },
    }
    if (sharers := run.engine.secondary_shard_ranks) > 1:  # a second copy of ZeRO-3's weights
        if world_size % sharers:
            raise ConfigError(
                f"engine.secondary_shard_ranks={sharers} does not divide {world_size} ranks; use a "
                "divisor, such as the ranks of a node"
            )
        derived["zero_optimization"]["zero_hpz_partition_size"] = sharers
    if run.engine.offload_optimizer:
        derived["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        # torch's fused AdamW is as fast on the CPU as DeepSpeed's, and needs no compiler.
        derived["zero_force_ds_cpu_optimizer"] = False
    match run.engine.number_format:
        case "fp32":
            pass
        case "bf16":
            derived["bf16"] = {"enabled": True, "check_grad_overflow": True}
        case "fp16":
            # Constant for DeepSpeed; the engine sets it from `pretrain.optim.loss_scale`.
            derived["fp16"] = {"enabled": True, "loss_scale": 1.0}
        case _:
            assert_never(run.engine.number_format)
    if precision_traits(run.engine.number_format).is_half and run.engine.zero_stage > 0:
        # Stage 0 cannot accumulate in another type than the weights'.
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
    if run.engine.zero_stage > 0:
        derived["communication_data_type"] = run.engine.reduction_precision
    for key in UNUSED_SECTIONS.keys() & run.engine.deepspeed_extra.keys():
        raise ConfigError(
            f"engine.deepspeed_extra.{key} has no effect; use {UNUSED_SECTIONS[key]} instead"
        )
    merged = _merged(derived, run.engine.deepspeed_extra, "engine.deepspeed_extra")
    merged["zero_optimization"] = _buckets(run, on_gpu) | merged["zero_optimization"]
    _refuse_other_optimizers(run, merged["zero_optimization"])
    return merged


def _refuse_other_optimizers(run: RunConfig, zero: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings with which DeepSpeed updates weights by an Adam of its own."""
    offload = zero.get("offload_optimizer")
    offload = offload if isinstance(offload, Mapping) else {}
    found = {
        "offload_optimizer.ratio": offload.get("ratio", 1.0) != 1.0,
        "offload_optimizer.super_offload": bool(offload.get("super_offload")),
        "zenflow": bool(zero.get("zenflow")),
    }
    for key, is_set in found.items():
        if is_set:
            raise ConfigError(
                f"engine.deepspeed_extra.zero_optimization.{key}: with it DeepSpeed's own Adam "
                f"updates weights, expected optim.name={run.optim.name} for all; remove it"
            )


def _buckets(run: RunConfig, on_gpu: bool) -> dict[str, Any]:
    """Return sizes that follow from the model, and may be set otherwise.

    DeepSpeed's own are for models of billions of parameters: buckets of 2 GB, and in ZeRO-3 as much
    of the model that stays gathered because it will be used again.
    """
    if run.engine.zero_stage == 0:
        return {}
    settings: dict[str, Any] = {
        "use_multi_rank_bucket_allreduce": False,  # True: twice the traffic, in stages 1 and 2
        "reduce_bucket_size": bucket_elements(run),
        "overlap_comm": overlaps_reduction(run, on_gpu),
    }
    if run.engine.zero_stage == 3:
        layer = parameters_of(run.model).body // run.model.num_layers
        settings |= {
            "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": 2 * layer + bucket_elements(run),
            "stage3_max_reuse_distance": layer,
        }
    return settings


def check_settings(deepspeed: Any, settings: dict[str, Any]) -> None:
    """Raise a ConfigError of one line if DeepSpeed rejects the settings."""
    try:
        deepspeed.DeepSpeedConfig(copy.deepcopy(settings))
    except (ValueError, AssertionError, deepspeed.DeepSpeedConfigError) as error:
        reason = " ".join(str(error).split("For further information")[0].split())
        raise ConfigError(
            f"engine.deepspeed_extra: DeepSpeed rejects it: {reason}; correct or remove it"
        ) from None


def is_unwrapped(run: RunConfig) -> bool:
    """Whether DeepSpeed runs our optimizer without a wrapper, as it does for stage 0 in fp32.

    It would then clip gradients without reporting their norm, so the engine does both.
    """
    return run.engine.zero_stage == 0 and not precision_traits(run.engine.number_format).is_half


def _merged(derived: dict[str, Any], extra: Mapping[str, Any], where: str) -> dict[str, Any]:
    merged = dict(derived)
    for key, value in extra.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value, f"{where}.{key}")
        elif key in merged and merged[key] != value:
            raise ConfigError(
                f"{where}.{key}: found {value!r}, expected {merged[key]!r}, which follows from the "
                "run's settings; remove it"
            )
        else:
            merged[key] = value
    return merged
