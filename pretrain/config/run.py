"""Every setting of a run, as frozen dataclasses read from YAML by `data_pipeline.config_loader`.

Torch-free: the launcher reads these on a login node. What can be derived is a property, not a
setting. `changeable` and `fixed` say what may change when a run is resumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from data_pipeline.config import CacheConfig, MixturePart
from data_pipeline.errors import ConfigError
from data_pipeline.files import url_of
from data_pipeline.setting_fields import (
    LARGEST_SEED,
    MOST,
    MOST_LANES,
    MOST_ROWS,
    MOST_THREADS,
    Range,
    check_ranges,
    require_name,
    setting,
)
from pretrain.config.model import MOST_LAYERS, ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.resume_rules import changeable, fixed

Precision = Literal["fp32", "bf16", "fp16"]
ActivationCheckpointing = Literal["none", "full", "selective"]
AttentionKernel = Literal["auto", "plain"]


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What changes from a step on; what is not set stays as before.

    With other lanes or another mixture the lanes restart, and memories are kept only if the number
    of lanes stays. With another segment length alone every lane continues, with its memory.
    """

    from_step: int = setting(allowed=Range(1, MOST))  # updates before the phase
    lanes: int = setting(0, Range(0, MOST_LANES))  # 0: as before
    segment_length: int = setting(0, Range(0, MOST_ROWS))  # 0: as before
    mixture: tuple[MixturePart, ...] = ()  # (): as before

    def __post_init__(self) -> None:
        check_ranges("data.phases.", self)
        if not (self.lanes or self.segment_length or self.mixture):
            raise ConfigError(
                f"the phase of data.phases from step {self.from_step} on changes nothing; expected "
                "lanes, a segment length or a mixture"
            )

    @property
    def restarts_lanes(self) -> bool:
        """Whether the phase has other lanes than the one before."""
        return bool(self.lanes or self.mixture)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which corpus, in how many lanes. A batch is `lanes` rows of `segment_length` tokens."""

    # A directory made by `data-pipeline build`, or the URL it was uploaded to. A corpus may move:
    # its manifest's hash is compared with the one in the lanes' cursor.
    path: Path = changeable(Path("data"))
    # Train on these instead; the tokenizer and the validation split remain those of `path`.
    mixture: tuple[MixturePart, ...] = fixed(())
    lanes: int = fixed(16, Range(1, MOST_LANES))
    segment_length: int = fixed(64, Range(1, MOST_ROWS))  # tgt_len
    cache: CacheConfig = changeable(default_factory=CacheConfig)  # of corpora named by a URL
    phases: tuple[PhaseConfig, ...] = changeable(())  # by step; only later ones may change

    def __post_init__(self) -> None:
        check_ranges("data.", self)
        steps = [phase.from_step for phase in self.phases]
        if sorted(set(steps)) != steps:
            raise ConfigError(
                f"data.phases start at the steps {steps}; expected each to start after the one "
                "before"
            )

    def directory(self) -> Path:
        """Where to read the corpus: `path`, or this node's cache of a URL.

        Fetches the manifests and the tokenizer of a URL.
        """
        if url_of(self.path) is None:
            return self.path
        from data_pipeline.corpora.remote_corpus import local_corpus_directory

        return local_corpus_directory(self.path, self.cache)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the model is sharded over the ranks and computed. Changes results by rounding at most."""

    kind: Literal["deepspeed", "torch"] = fixed("deepspeed")
    zero_stage: Literal[0, 1, 2, 3] = 1
    precision: Precision = "fp32"  # of weights and activations; the optimizer always uses fp32
    # fp16: the first factor of the loss, a power of two; adapted as it trains
    initial_loss_scale: float = setting(65536.0, Range(1, 2.0**64))
    # fp16: updates without overflow after which the scale doubles
    loss_scale_window: int = setting(1000, Range(1, MOST))
    # selective: recompute only attention's scores and weights in the backward pass
    activation_checkpointing: ActivationCheckpointing = "none"
    # Apply activation checkpointing to one layer in N.
    checkpoint_every_n_layers: int = setting(1, Range(1, MOST_LAYERS))
    # Keep master weights and moments, and run the update, on the CPU; needs ZeRO 1 or more.
    offload_optimizer: bool = False
    offload_memories: bool = False  # keep memories of inactive slots in host memory
    # auto: the fastest for the device; plain: torch operations to compare with
    attention_kernel: AttentionKernel = "auto"
    # Tokens per pass through the output layer, which the backward pass repeats; 0: all.
    logits_chunk_tokens: int = setting(0, Range(0, MOST))
    # Most lanes per rank and forward pass; 0: all of the rank's.
    micro_batch_lanes: int = setting(0, Range(0, MOST_LANES))
    # CPU threads per rank; 0: cores divided by the ranks on this node.
    threads: int = setting(0, Range(0, MOST_THREADS))
    # Longest step, evaluation or save; after it a rank writes its stacks and exits. 0: no timeout.
    watchdog_timeout_seconds: float = setting(1800.0, Range(0, 1e7))
    # Merged into DeepSpeed's settings last; may not contradict a derived key.
    deepspeed_extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges("engine.", self)
        if self.kind == "torch" and self.zero_stage > 1:
            raise ConfigError(
                f"engine.zero_stage={self.zero_stage} needs engine.kind=deepspeed, found torch, "
                "which shards nothing; remove one of them"
            )
        if self.offload_optimizer and (self.kind == "torch" or self.zero_stage == 0):
            raise ConfigError(
                "engine.offload_optimizer needs engine.kind=deepspeed and engine.zero_stage of 1 "
                f"or more, found {self.kind} and {self.zero_stage}"
            )
        if math.frexp(self.initial_loss_scale)[0] != 0.5:
            raise ConfigError(
                f"engine.initial_loss_scale={self.initial_loss_scale:g} must be a power of two"
            )
        _reject_nvme(self.deepspeed_extra)


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


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What a run does on its own about anomalous gradients and losses.

    A loss is anomalous if it is `spike_threshold` robust standard deviations above the median of
    the last `window` losses. If losses stay there, or updates are skipped, for `spike_steps` steps
    in a row, the run rewinds to the checkpoint before the first of them and skips their data.
    """

    # Skip steps with a larger norm; 0: only non-finite ones.
    skip_grad_norm: float = setting(0.0, Range(0, MOST))
    # Stop the run if more than this part of the last `window` updates were skipped; 1: never.
    max_skipped_fraction: float = setting(0.5, Range(0, 1))
    spike_threshold: float = setting(8.0, Range(0, 1e6))  # 0: never rewind
    spike_steps: int = setting(20, Range(1, 1_000_000))  # a shorter jump of the loss is no spike
    # Losses to compare with: short, so that the loss falls little within it. The run cannot rewind
    # before it has as many of the same data, or in the warm-up of the learning rate.
    window: int = setting(50, Range(10, 1_000_000))
    skip_margin_segments: int = setting(10, Range(0, MOST))  # after the spike, skipped as well
    max_rewinds: int = setting(3, Range(0, 1_000_000))  # then the run stops, with a report
    # Name a rank that takes this many times as long as the median of the others; 0: never.
    straggler_ratio: float = setting(1.5, Range(1, 1e6, or_zero=True))

    def __post_init__(self) -> None:
        check_ranges("recovery.", self)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often a run saves, and which checkpoints are kept: the latest and those named here."""

    interval: int = setting(200, Range(1, MOST))  # steps
    asynchronous: bool = True  # write in the background, from a copy in host memory
    keep_last: int = setting(3, Range(1, MOST))
    # Keep checkpoints whose step is a multiple of it; 0: none.
    keep_every: int = setting(0, Range(0, MOST))
    # Keep this many with the lowest validation loss.
    keep_best: int = setting(0, Range(0, MOST))
    # How long to train on while the run directory cannot be written (disk full, over quota, not
    # writable, server away) and to try again; then the run stops. 0: stop at the first failure.
    storage_patience_seconds: float = setting(1800.0, Range(0, 1e7))

    def __post_init__(self) -> None:
        check_ranges("checkpoint.", self)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    interval: int = setting(200, Range(0, MOST))  # steps; 0: only at the end
    lanes: int = setting(8, Range(1, MOST_LANES))
    # Of the validation split, per evaluation; 0: all of it.
    max_tokens: int = setting(100_000, Range(0, MOST))

    def __post_init__(self) -> None:
        check_ranges("evaluation.", self)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    interval: int = setting(10, Range(1, MOST))  # steps
    tensorboard: bool = True
    # First and last step of rank 0's profile; zeros: none.
    profile_steps: tuple[int, int] = setting((0, 0), Range(0, MOST))

    def __post_init__(self) -> None:
        check_ranges("metrics.", self)
        first, last = self.profile_steps
        if (first or last) and not 1 <= first <= last:
            raise ConfigError(
                f"metrics.profile_steps=[{first}, {last}] must be a first step of 1 or more and a "
                "last one that is not before it"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. The same file, seed and corpus give the same run."""

    name: str = fixed("run")
    seed: int = fixed(1, Range(0, LARGEST_SEED))
    # An export to start from; none: weights drawn from the published distribution.
    initial_weights: Path | None = fixed(None)
    # Names of model settings, such as clamp_length, in which that export may differ from this run.
    initial_weights_may_differ: tuple[str, ...] = fixed(())
    model: ModelConfig = fixed(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = fixed(default_factory=OptimConfig)
    engine: EngineConfig = changeable(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = changeable(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = changeable(default_factory=RecoveryConfig)
    evaluation: EvaluationConfig = changeable(default_factory=EvaluationConfig)
    metrics: MetricsConfig = changeable(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        check_ranges("", self)
        require_name("name", self.name)
        known = {each.name for each in fields(ModelConfig)}
        if unknown := sorted(set(self.initial_weights_may_differ) - known):
            raise ConfigError(
                f"initial_weights_may_differ: found {', '.join(unknown)}, expected names of model "
                "settings, such as clamp_length"
            )
        saved, evaluated = self.checkpoint.interval, self.evaluation.interval
        if self.checkpoint.keep_best and (not evaluated or saved % evaluated):
            raise ConfigError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs an evaluation at every "
                f"saved step: checkpoint.interval={saved} must be a multiple of "
                f"evaluation.interval={evaluated}"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.data.lanes * self.data.segment_length


def lanes_of_rank(run: RunConfig, rank: int, world_size: int) -> range:
    """The contiguous lanes that `rank` owns; ConfigError if lanes do not divide over the ranks.

    Lanes are global: what they read does not depend on the number of ranks.
    """
    if run.data.lanes % world_size:
        raise ConfigError(
            f"data.lanes={run.data.lanes} does not divide over {world_size} ranks; "
            f"use a multiple of {world_size} lanes or another number of ranks"
        )
    count = run.data.lanes // world_size
    return range(rank * count, (rank + 1) * count)


def accumulation_steps(run: RunConfig, world_size: int) -> int:
    """Forward passes per optimizer step.

    Each is a fixed group of lanes (a slot) with its own memory.
    """
    per_rank = len(lanes_of_rank(run, 0, world_size))
    micro = min(run.engine.micro_batch_lanes or per_rank, per_rank)
    if per_rank % micro:
        raise ConfigError(
            f"engine.micro_batch_lanes={micro} does not divide the {per_rank} lanes of each rank "
            f"(data.lanes={run.data.lanes} over {world_size} ranks); use a divisor of {per_rank}"
        )
    return per_rank // micro
