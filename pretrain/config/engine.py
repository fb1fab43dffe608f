"""How a run is computed: engine, sharding, precision, recomputation and offloading."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from data_pipeline.errors import ConfigError
from data_pipeline.setting_fields import (
    MOST,
    MOST_LANES,
    MOST_THREADS,
    Range,
    check_ranges,
    setting,
)
from pretrain.config.choices import (
    ActivationCheckpointing,
    AttentionKernel,
    EngineKind,
    Precision,
    PrecisionSetting,
    ReductionPrecision,
    reduction_bytes,
    resolved_precision,
    shards,
)
from pretrain.config.model import MOST_LAYERS
from pretrain.config.resume_rules import fixed

MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the model is sharded over the ranks and computed. Changes results by rounding at most."""

    kind: EngineKind = fixed("deepspeed")
    """What runs the updates; torch is for one device."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """Shard optimizer state (1), gradients (2), weights (3) over the ranks; 0, torch: nothing."""
    reduction_precision: ReductionPrecision = "fp32"
    """In which gradients are summed over the ranks; bf16: half the traffic, rounded sums."""
    secondary_shard_ranks: int = setting(0, Range(0, MOST_RANKS), unit="ranks")
    """ZeRO-3: ranks, such as a node's, that share a second copy of the weights; 0: no copy."""
    precision: PrecisionSetting = "auto"
    """Weights and activations; auto: bf16 on GPUs that have it, else fp32, chosen at the start."""
    initial_loss_scale: float = setting(65536.0, Range(1, 2.0**64))
    """fp16: first factor of the loss, a power of two; adapted as the run trains."""
    loss_scale_window: int = setting(1000, Range(1, MOST), unit="steps")
    """fp16: updates without overflow after which the scale doubles."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward pass recomputes; selective: attention's scores, the delta rule."""
    checkpoint_every_n_layers: int = setting(1, Range(1, MOST_LAYERS), unit="layers")
    """Apply activation checkpointing to one layer in N."""
    offload_optimizer: bool = False
    """Keep master weights and moments, and run the update, on the CPU; needs ZeRO 1 or more."""
    offload_memories: bool = False
    """Keep memories of inactive slots in host memory."""
    attention_kernel: AttentionKernel = "auto"
    """auto: fastest with ordered sums; sdpa: torch's; atomic: unordered sums; plain: to compare."""
    compile: bool = False
    """Compile, in training, what lies between attentions; rounds otherwise; not tried on a GPU."""
    logits_chunk_tokens: int = setting(0, Range(0, MOST), unit="tokens")
    """Tokens per pass through the output layer, which the backward pass repeats; 0: all."""
    sequence_ranks: int = setting(1, Range(1, MOST_RANKS), unit="ranks")
    """Ranks that share the same lanes, for long segments; heads and lengths divide by it."""
    micro_batch_lanes: int = setting(0, Range(0, MOST_LANES), unit="lanes")
    """Most lanes per rank and forward pass; accumulation steps follow from it; 0: all lanes."""
    threads: int = setting(0, Range(0, MOST_THREADS), unit="threads")
    """CPU threads per rank; 0: cores divided by the ranks on this node."""
    watchdog_timeout_seconds: float = setting(1800.0, Range(0, 1e7), unit="seconds")
    """Longest step, evaluation or save; then a rank writes its stacks and exits; 0: no limit."""
    deepspeed_extra: dict[str, Any] = field(default_factory=dict)
    """Merged into DeepSpeed's settings last; may not contradict a derived key."""

    def __post_init__(self) -> None:
        check_ranges("engine.", self)
        if not shards(self.kind) and self.zero_stage > 2:  # 2 is the default, nobody asked for it
            raise ConfigError(
                f"engine.zero_stage={self.zero_stage} needs engine.kind=deepspeed, found "
                f"{self.kind}, which shards nothing; remove one of them"
            )
        if self.offload_optimizer and (not shards(self.kind) or self.zero_stage == 0):
            raise ConfigError(
                "engine.offload_optimizer needs engine.kind=deepspeed and engine.zero_stage of 1 "
                f"or more, found {self.kind} and {self.zero_stage}"
            )
        self._check_reduction()
        if math.frexp(self.initial_loss_scale)[0] != 0.5:
            raise ConfigError(
                f"engine.initial_loss_scale={self.initial_loss_scale:g} must be a power of two"
            )
        _reject_nvme(self.deepspeed_extra)

    def _check_reduction(self) -> None:
        is_plain = not shards(self.kind) or self.zero_stage == 0
        if is_plain and reduction_bytes(self.reduction_precision) < 4:
            raise ConfigError(
                f"engine.reduction_precision={self.reduction_precision} needs "
                "engine.kind=deepspeed and engine.zero_stage of 1 or more, found "
                f"{self.kind} and {self.zero_stage}"
            )
        if self.secondary_shard_ranks > 1 and (not shards(self.kind) or self.zero_stage < 3):
            raise ConfigError(
                f"engine.secondary_shard_ranks={self.secondary_shard_ranks} needs "
                f"engine.kind=deepspeed and engine.zero_stage=3, found {self.kind} and "
                f"{self.zero_stage}: in lower stages every rank has all weights"
            )

    @property
    def number_format(self) -> Precision:
        """The precision; of `auto`, as long as no device has been asked, a CPU's."""
        return resolved_precision(self.precision, best="fp32")


def _reject_nvme(deepspeed_extra: dict[str, Any]) -> None:
    """ConfigError for state on NVMe: checkpoints, EMA and LAMB access it in memory."""
    zero = deepspeed_extra.get("zero_optimization")
    for what in ("offload_optimizer", "offload_param"):
        offload = zero.get(what) if isinstance(zero, dict) else None
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            raise ConfigError(
                f"engine.deepspeed_extra.zero_optimization.{what}.device=nvme: found state that "
                "DeepSpeed swaps to disk, expected it in memory, where checkpoints can read it; "
                "use engine.offload_optimizer=true or more ranks"
            )
