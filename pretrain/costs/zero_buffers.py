"""Which of DeepSpeed's optimizers a run gets, and what that keeps besides weights and moments.

DeepSpeed 0.19.8 decides by stage, precision and offloading; tests compare these functions with the
optimizer that results and with the bytes of real steps. Torch-free. P parameters, R ranks, w bytes
of a weight, c bytes in which gradients are summed over the ranks:

    optimizer                      gradients in the backward pass      they are summed
    (none), FP16_UnfusedOptimizer  w P                                 after it
    BF16_Optimizer                 4 P, and 2 P until the update       after it
    DeepSpeedZeroOptimizer         stage 1: 4 P + 4 P / R              after it
    DeepSpeedZeroOptimizer         stage 2: 4 P / R                    bucket by bucket in it
    DeepSpeedZeroOptimizer_Stage3  4 P / R                             bucket by bucket in it

On a GPU stages 2 and 3 sum a bucket on a stream of its own while the pass goes on (overlap_comm).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foundation.settings import assert_never
from pretrain.config.choices import (
    ZeroOptimizer,
    learns_to_compress,
    precision_traits,
    reduction_bytes,
    shards,
)
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.flops import bins_of, moment_bytes, parameters_of

# Elements of a bucket at least: smaller sums take as long as this one on most networks.
SMALLEST_BUCKET = 1 << 22
COPIED = 500_000_000  # elements at most that stages 0 and 1 copy at a time, to sum them


@dataclass(frozen=True)
class Buffers:
    """Bytes of a rank during the backward pass, and of what is offloaded in its host memory."""

    gradients: float
    gradients_formula: str
    buckets: float
    buckets_formula: str
    offloaded: float


def stage_of(run: RunConfig) -> int:
    """Return the ZeRO stage; plain torch has none."""
    return run.engine.zero_stage if shards(run.engine.kind) else 0


def optimizer_of(run: RunConfig) -> ZeroOptimizer:
    """Return the class that DeepSpeed wraps around our optimizer; empty if it does not."""
    stage, precision = stage_of(run), run.engine.number_format
    if stage == 3:
        return "DeepSpeedZeroOptimizer_Stage3"
    if stage == 0:
        is_wrapped = shards(run.engine.kind) and precision_traits(precision).is_half
        return "FP16_UnfusedOptimizer" if is_wrapped else ""
    if stage == 1 and not run.engine.offload_optimizer:
        match precision:
            case "bf16":
                return "BF16_Optimizer"
            case "fp16" | "fp32":
                pass
            case _:
                assert_never(precision)
    return "DeepSpeedZeroOptimizer"


def overlaps_reduction(run: RunConfig, on_gpu: bool) -> bool:
    """Whether gradients are summed over the ranks while the backward pass goes on."""
    return on_gpu and (
        stage_of(run) == 3 or (stage_of(run) == 2 and not run.engine.offload_optimizer)
    )


def bucket_elements(run: RunConfig) -> int:
    """Return the size of a bucket: the largest parameter's.

    ZeRO-2 sums a larger parameter's gradient in place and lets go of it: on a GPU its memory could
    get into use again while it is read. DeepSpeed's 500,000,000 would be 2 GB for each of up to
    four buffers.
    """
    zero = run.engine.deepspeed_extra.get("zero_optimization")
    given = zero.get("reduce_bucket_size") if isinstance(zero, Mapping) else None
    # DeepSpeed takes 5e8, too, and rejects values that are not numbers.
    return int(given) if isinstance(given, (int, float)) else smallest_bucket(run.model)


def smallest_bucket(model: ModelConfig) -> int:
    """Return the elements of a bucket into which every parameter fits."""
    return min(parameters_of(model).total, max(SMALLEST_BUCKET, largest_parameter(model)))


def largest_parameter(model: ModelConfig) -> int:
    """Return the elements of the largest parameter."""
    attention = model.head_width * max(model.num_heads, 2 * model.key_heads)
    learns = model.compressed_length and learns_to_compress(model.compression)
    compressed = model.compression_rate * model.d_model if learns else 0
    values = model.num_heads * model.deltanet_value_width if model.num_deltanet_layers else 0
    rows = max(attention, values, model.inner_width, compressed, model.memory_tokens)
    bins = (size * width for size, width in bins_of(model))
    return max(rows * model.d_model, *bins)


def buffers_of(run: RunConfig, world_size: int, on_gpu: bool) -> Buffers:
    """Return what a rank keeps of gradients and buckets at the peak of its backward pass."""
    P, R, stage = parameters_of(run.model).total, world_size, stage_of(run)
    w, c = _weight_bytes(run), reduction_bytes(run.engine.reduction_precision)
    bucket = bucket_elements(run)
    # A bucket is put together in the weights' type; one more copy, or two, are on their way.
    staged = 2 if overlaps_reduction(run, on_gpu) else 1
    offloads = run.engine.offload_optimizer
    kind = optimizer_of(run)
    moments = moment_bytes(run.model, run.optim, P)
    match kind:
        case "" | "FP16_UnfusedOptimizer":
            own = w if shards(run.engine.kind) else 4
            copied = own * min(P, COPIED) if shards(run.engine.kind) else 0
            return Buffers(own * P, f"{own} P", copied, f"{own} P, at most {COPIED:,} of them", 0)
        case "BF16_Optimizer":
            copied = (4 + (c if c != 4 else 0)) * min(P, COPIED)
            formula = "4 P in float32 and 2 P as computed"
            return Buffers(6 * P, formula, copied, f"4 P, at most {COPIED:,} of them", 0)
        case "DeepSpeedZeroOptimizer":
            kept = (8 + w) * P + moments
            offloaded = kept / R + w * largest_parameter(run.model) if offloads else 0
            if stage == 1:
                size, formula = 4 * P + 4 * P / R, "4 P, and 4 P / R when they are summed"
                return Buffers(size, formula, 4 * bucket, "4 bytes of a bucket", offloaded)
            several = w == 4 and accumulation_steps(run, R) > 1  # the sum so far, and the next
            size = (8 if several else 4) * P / R
            formula = "8 P / R, sum and next" if several else "4 P / R"
            copies = w + (c if c != w else 0)
            words = f"{staged} * {w} bytes of a bucket, {copies} of a rank's part of it"
            buckets = staged * w * bucket + copies * min(bucket, P / R)
            return Buffers(size, formula, buckets, words, offloaded)
        case "DeepSpeedZeroOptimizer_Stage3":
            gradients = (0, "on the CPU") if offloads else (4 * P / R, "4 P / R")
            offloaded = (12 * P + moments) / R if offloads else 0
            return Buffers(*gradients, 2 * c * bucket, f"2 * {c} bytes of a bucket", offloaded)
        case _:
            assert_never(kind)


def _weight_bytes(run: RunConfig) -> int:
    return precision_traits(run.engine.number_format).bytes
