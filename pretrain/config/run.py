"""Every setting of a run, as frozen dataclasses; YAML files are read into them by `data_pipeline.config_loader`.

Torch-free: the launcher reads these on a login node. What can be derived is a property, not a setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_pipeline.corpora.cache_config import CacheConfig
from data_pipeline.errors import ConfigError
from data_pipeline.lanes.mixture_part import MixturePart
from data_pipeline.location import url_of
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig

Precision = Literal["fp32", "bf16", "fp16"]
ActivationCheckpointing = Literal["none", "full", "selective"]
AttentionKernel = Literal["auto", "plain"]


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What changes from a step on; what is not named stays. Lanes or a mixture: the lanes begin anew, and what memory
    holds stays only if their number does. The segment length alone: every lane goes on where it is, with its memory."""

    from_step: int  # updates before the phase
    lanes: int = 0  # 0: as many as before
    segment_length: int = 0  # 0: as long as before
    mixture: tuple[MixturePart, ...] = ()  # none: the same data as before

    def __post_init__(self) -> None:
        changes = self.lanes or self.segment_length or self.mixture
        if self.from_step < 1 or min(self.lanes, self.segment_length) < 0 or not changes:
            raise ConfigError(
                f"a phase of data.phases has from_step={self.from_step}, lanes={self.lanes}, segment_length="
                f"{self.segment_length} and {len(self.mixture)} corpora; expected from_step of 1 or more, and lanes, "
                "a segment length or a mixture"
            )

    @property
    def begins_lanes(self) -> bool:
        """Whether the lanes of the phase are other ones than those before."""
        return bool(self.lanes or self.mixture)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which corpus, cut into how many lanes. The global batch is `lanes` rows of `segment_length` tokens."""

    path: Path = Path(
        "data"
    )  # a directory made by `data-pipeline build`, or the URL it was uploaded to
    mixture: tuple[
        MixturePart, ...
    ] = ()  # train on these instead; tokenizer and validation stay those of `path`
    lanes: int = 16
    segment_length: int = 64  # tgt_len
    cache: CacheConfig = field(default_factory=CacheConfig)  # of corpora that are named by a URL
    phases: tuple[PhaseConfig, ...] = ()  # in the order of their steps

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.segment_length < 1:
            raise ConfigError(
                f"data.lanes={self.lanes} and data.segment_length={self.segment_length} must be positive"
            )
        steps = [phase.from_step for phase in self.phases]
        if sorted(set(steps)) != steps:
            raise ConfigError(
                f"data.phases begin at the steps {steps}, expected each to begin after the one before"
            )

    def directory(self) -> Path:
        """Where to read the corpus: `path` or, for a URL, this node's cache, with manifests and tokenizer fetched."""
        if url_of(self.path) is None:
            return self.path
        from data_pipeline.corpora.remote_corpus import local_corpus_directory

        return local_corpus_directory(self.path, self.cache)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the model is spread over the ranks. None of it changes what is learned beyond rounding."""

    kind: Literal["deepspeed", "torch"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = 1
    precision: Precision = "fp32"  # of weights and activations; the optimizer's are fp32 always
    initial_loss_scale: float = (
        65536.0  # fp16: what the loss is multiplied by at first; found anew as the run goes on
    )
    loss_scale_window: int = 1000  # fp16: updates without overflow after which it is doubled
    activation_checkpointing: ActivationCheckpointing = (
        "none"  # selective: attention's scores and weights alone
    )
    checkpoint_every_n_layers: int = 1  # of so many layers one is checkpointed
    offload_optimizer: bool = (
        False  # master weights, moments and the update on the CPU; needs ZeRO 1 or more
    )
    offload_memories: bool = False  # those of slots that are not at work live in host memory
    attention_kernel: AttentionKernel = (
        "auto"  # the fastest for the device, or plain torch operations to compare with
    )
    logits_chunk_tokens: int = (
        0  # the output layer takes so many tokens at a time, again in the backward pass; 0: all
    )
    micro_batch_lanes: int = (
        0  # at most this many lanes per rank and forward pass; 0: all of the rank's
    )
    threads: int = 0  # CPU threads per rank; 0: cores divided by the ranks on this host
    watchdog_timeout_seconds: float = (
        1800.0  # longest step, evaluation or save; then stacks are shown and the rank ends; 0: any
    )
    deepspeed_extra: dict[str, Any] = field(
        default_factory=dict
    )  # merged last; may not contradict a derived key

    def __post_init__(self) -> None:
        if self.logits_chunk_tokens < 0:
            raise ConfigError(
                f"engine.logits_chunk_tokens={self.logits_chunk_tokens} must be 0 (all at once) or more"
            )
        if min(self.micro_batch_lanes, self.threads) < 0:
            raise ConfigError(
                f"engine.micro_batch_lanes={self.micro_batch_lanes} and engine.threads={self.threads} must be 0 (all, "
                "each its share) or more"
            )
        if self.checkpoint_every_n_layers < 1:
            raise ConfigError(
                f"engine.checkpoint_every_n_layers={self.checkpoint_every_n_layers} must be 1 (every layer) or more"
            )
        if self.offload_optimizer and (self.kind == "torch" or self.zero_stage == 0):
            raise ConfigError(
                f"engine.offload_optimizer needs engine.kind=deepspeed and engine.zero_stage of 1 or more, found "
                f"{self.kind} and {self.zero_stage}"
            )
        if self.initial_loss_scale < 1 or math.frexp(self.initial_loss_scale)[0] != 0.5:
            raise ConfigError(
                f"engine.initial_loss_scale={self.initial_loss_scale:g} must be a power of two, 1 or more"
            )
        if self.loss_scale_window < 1:
            raise ConfigError(
                f"engine.loss_scale_window={self.loss_scale_window} must be 1 update or more"
            )
        _refuse_swapping_to_disk(self.deepspeed_extra)
        if self.watchdog_timeout_seconds < 0:
            raise ConfigError(
                f"engine.watchdog_timeout_seconds={self.watchdog_timeout_seconds:g} must be 0 (wait for ever) or more"
            )


def _refuse_swapping_to_disk(deepspeed_extra: dict[str, Any]) -> None:
    """Checkpoints, averages and LAMB read and write weights and moments where they lie in memory."""
    zero = deepspeed_extra.get("zero_optimization")
    for what in ("offload_optimizer", "offload_param"):
        offload = zero.get(what) if isinstance(zero, dict) else None
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            raise ConfigError(
                f"engine.deepspeed_extra.zero_optimization.{what}.device=nvme: found state that DeepSpeed swaps to "
                "disk, expected it in memory, where checkpoints can hold it; use engine.offload_optimizer=true or more "
                "ranks"
            )


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What a run does by itself about gradients and losses that are far out of line.

    A loss is a spike when it lies `spike_threshold` robust standard deviations above the median of the last `window`
    losses. After `spike_steps` spikes or skipped steps in a row the run goes back to the checkpoint before the first
    of them, and passes over the data from there to `skip_margin_segments` steps behind the last.
    """

    skip_grad_norm: float = (
        0.0  # gradients longer than this are not applied; 0: only those that are no numbers
    )
    spike_threshold: float = 8.0  # 0: never go back
    spike_steps: int = 3
    window: int = 50  # short beside what the loss falls by itself
    skip_margin_segments: int = 10
    max_rewinds: int = 3  # then the run stops, with a report
    straggler_ratio: float = (
        1.5  # name a rank that takes this many times as long as the others; 0: none
    )

    def __post_init__(self) -> None:
        if (
            min(
                self.skip_grad_norm,
                self.spike_threshold,
                self.skip_margin_segments,
                self.max_rewinds,
                self.straggler_ratio,
            )
            < 0
        ):
            raise ConfigError(
                "recovery.skip_grad_norm, spike_threshold, skip_margin_segments, max_rewinds "
                "and straggler_ratio must be 0 or more"
            )
        if self.spike_steps < 1 or self.window < 10:
            raise ConfigError(
                f"recovery.spike_steps={self.spike_steps} must be 1 or more, recovery.window={self.window} 10 or more"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often a run is saved, and which of its checkpoints stay: the newest, and those that `keep_every` adds."""

    interval: int = 200  # steps
    asynchronous: bool = (
        True  # write while training goes on; costs host memory for a copy of each rank's part
    )
    keep_last: int = 3
    keep_every: int = 0  # checkpoints whose step is a multiple of it stay for ever; 0: none do
    keep_best: int = 0  # so many with the lowest validation loss stay as well

    def __post_init__(self) -> None:
        if self.interval < 1 or self.keep_last < 1:
            raise ConfigError("checkpoint.interval and checkpoint.keep_last must be at least 1")
        if self.keep_every < 0:
            raise ConfigError(
                f"checkpoint.keep_every={self.keep_every} must be 0 (none) or a number of steps"
            )
        if self.keep_best < 0:
            raise ConfigError(f"checkpoint.keep_best={self.keep_best} must be 0 (none) or more")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    interval: int = 200  # steps; 0: only at the end
    lanes: int = 8
    max_tokens: int = 100_000  # of the validation split, per evaluation; 0: all of it

    def __post_init__(self) -> None:
        if self.lanes < 1 or min(self.interval, self.max_tokens) < 0:
            raise ConfigError(
                f"evaluation.lanes={self.lanes} must be 1 or more, evaluation.interval={self.interval} and "
                f"evaluation.max_tokens={self.max_tokens} 0 or more"
            )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    interval: int = 10  # steps
    tensorboard: bool = True
    profile_steps: tuple[int, int] = (
        0,
        0,
    )  # first and last step of a profiler trace of rank 0; zeros: none

    def __post_init__(self) -> None:
        first, last = self.profile_steps
        if self.interval < 1:
            raise ConfigError(f"metrics.interval={self.interval} must be 1 step or more")
        if (first or last) and not 1 <= first <= last:
            raise ConfigError(
                f"metrics.profile_steps=[{first}, {last}] must be a first step of 1 or more and a last one behind it"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. The same file, seed and corpus give the same run."""

    name: str = "run"
    seed: int = 1
    initial_weights: Path | None = (
        None  # an export whose weights the run begins with; none: the published distribution
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        saved, evaluated = self.checkpoint.interval, self.evaluation.interval
        if self.checkpoint.keep_best and (not evaluated or saved % evaluated):
            raise ConfigError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs an evaluation at every saved step: "
                f"checkpoint.interval={saved} must be a multiple of evaluation.interval={evaluated}"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.data.lanes * self.data.segment_length


def lanes_of_rank(run: RunConfig, rank: int, world_size: int) -> range:
    """The contiguous lanes that `rank` owns. Lanes are global: the streams do not depend on the number of ranks."""
    if run.data.lanes % world_size:
        raise ConfigError(
            f"data.lanes={run.data.lanes} does not divide over {world_size} ranks; "
            f"use a multiple of {world_size} lanes or another number of ranks"
        )
    count = run.data.lanes // world_size
    return range(rank * count, (rank + 1) * count)


def accumulation_steps(run: RunConfig, world_size: int) -> int:
    """Forward passes per optimizer step; each is a fixed group of lanes (a slot) with a memory of its own."""
    per_rank = len(lanes_of_rank(run, 0, world_size))
    micro = min(run.engine.micro_batch_lanes or per_rank, per_rank)
    if per_rank % micro:
        raise ConfigError(
            f"engine.micro_batch_lanes={micro} does not divide the {per_rank} lanes of each rank "
            f"(data.lanes={run.data.lanes} over {world_size} ranks); use a divisor of {per_rank}"
        )
    return per_rank // micro
