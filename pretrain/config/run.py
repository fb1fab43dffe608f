"""Every setting of a run, as frozen dataclasses read from YAML by `data_pipeline.config_loader`.

Torch-free: the launcher reads these on a login node. What can be derived is a property, not a
setting. `changeable` and `fixed` say what may change when a run is resumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_pipeline.config import CacheConfig, MixturePart
from data_pipeline.errors import ConfigError
from data_pipeline.files import url_of
from pretrain.config.fields import changeable, fixed, require_at_least, require_name
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig

Precision = Literal["fp32", "bf16", "fp16"]
ActivationCheckpointing = Literal["none", "full", "selective"]
AttentionKernel = Literal["auto", "plain"]


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What changes from a step on; what is not set stays as before.

    With other lanes or another mixture the lanes restart, and memories are kept only if the number
    of lanes stays. With another segment length alone every lane continues, with its memory.
    """

    from_step: int  # updates before the phase
    lanes: int = 0  # 0: as before
    segment_length: int = 0  # 0: as before
    mixture: tuple[MixturePart, ...] = ()  # (): as before

    def __post_init__(self) -> None:
        changes = self.lanes or self.segment_length or self.mixture
        if self.from_step < 1 or min(self.lanes, self.segment_length) < 0 or not changes:
            raise ConfigError(
                f"a phase of data.phases has from_step={self.from_step}, lanes={self.lanes}, "
                f"segment_length={self.segment_length} and {len(self.mixture)} corpora; expected "
                "from_step of 1 or more, and lanes, a segment length or a mixture"
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
    lanes: int = fixed(16)
    segment_length: int = fixed(64)  # tgt_len
    cache: CacheConfig = changeable(default_factory=CacheConfig)  # of corpora named by a URL
    phases: tuple[PhaseConfig, ...] = changeable(())  # by step; only later ones may change

    def __post_init__(self) -> None:
        require_at_least(1, "data", self, "lanes", "segment_length")
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
    initial_loss_scale: float = 65536.0  # fp16: the first factor of the loss; adapted as it trains
    loss_scale_window: int = 1000  # fp16: updates without overflow after which the scale doubles
    # selective: recompute only attention's scores and weights in the backward pass
    activation_checkpointing: ActivationCheckpointing = "none"
    checkpoint_every_n_layers: int = 1  # apply activation checkpointing to one layer in N
    # Keep master weights and moments, and run the update, on the CPU; needs ZeRO 1 or more.
    offload_optimizer: bool = False
    offload_memories: bool = False  # keep memories of inactive slots in host memory
    # auto: the fastest for the device; plain: torch operations to compare with
    attention_kernel: AttentionKernel = "auto"
    # Tokens per pass through the output layer, which the backward pass repeats; 0: all.
    logits_chunk_tokens: int = 0
    micro_batch_lanes: int = 0  # most lanes per rank and forward pass; 0: all of the rank's
    threads: int = 0  # CPU threads per rank; 0: cores divided by the ranks on this node
    # Longest step, evaluation or save; after it a rank writes its stacks and exits. 0: no timeout.
    watchdog_timeout_seconds: float = 1800.0
    # Merged into DeepSpeed's settings last; may not contradict a derived key.
    deepspeed_extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from_zero = ("logits_chunk_tokens", "micro_batch_lanes", "threads")
        require_at_least(0, "engine", self, *from_zero, "watchdog_timeout_seconds")
        require_at_least(1, "engine", self, "checkpoint_every_n_layers", "loss_scale_window")
        if self.offload_optimizer and (self.kind == "torch" or self.zero_stage == 0):
            raise ConfigError(
                "engine.offload_optimizer needs engine.kind=deepspeed and engine.zero_stage of 1 "
                f"or more, found {self.kind} and {self.zero_stage}"
            )
        if self.initial_loss_scale < 1 or math.frexp(self.initial_loss_scale)[0] != 0.5:
            raise ConfigError(
                f"engine.initial_loss_scale={self.initial_loss_scale:g} must be a power of two, "
                "1 or more"
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
    the last `window` losses. After `spike_steps` anomalous or skipped steps in a row the run
    rewinds to the checkpoint before the first of them, and skips the data from there to
    `skip_margin_segments` segments after the last.
    """

    skip_grad_norm: float = 0.0  # skip steps with a larger norm; 0: only non-finite ones
    spike_threshold: float = 8.0  # 0: never rewind
    spike_steps: int = 3
    window: int = 50  # short, so that the loss falls little within it
    skip_margin_segments: int = 10
    max_rewinds: int = 3  # then the run stops, with a report
    # Name a rank that takes this many times as long as the median of the others; 0: never.
    straggler_ratio: float = 1.5

    def __post_init__(self) -> None:
        from_zero = ("skip_grad_norm", "spike_threshold", "skip_margin_segments", "max_rewinds")
        require_at_least(0, "recovery", self, *from_zero, "straggler_ratio")
        require_at_least(1, "recovery", self, "spike_steps")
        require_at_least(10, "recovery", self, "window")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often a run saves, and which checkpoints are kept: the latest and those named here."""

    interval: int = 200  # steps
    asynchronous: bool = True  # write in the background, from a copy in host memory
    keep_last: int = 3
    keep_every: int = 0  # keep checkpoints whose step is a multiple of it; 0: none
    keep_best: int = 0  # keep this many with the lowest validation loss

    def __post_init__(self) -> None:
        require_at_least(1, "checkpoint", self, "interval", "keep_last")
        require_at_least(0, "checkpoint", self, "keep_every", "keep_best")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    interval: int = 200  # steps; 0: only at the end
    lanes: int = 8
    max_tokens: int = 100_000  # of the validation split, per evaluation; 0: all of it

    def __post_init__(self) -> None:
        require_at_least(1, "evaluation", self, "lanes")
        require_at_least(0, "evaluation", self, "interval", "max_tokens")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    interval: int = 10  # steps
    tensorboard: bool = True
    profile_steps: tuple[int, int] = (0, 0)  # first and last step of rank 0's profile; zeros: none

    def __post_init__(self) -> None:
        require_at_least(1, "metrics", self, "interval")
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
    seed: int = fixed(1)
    # An export to start from; none: weights drawn from the published distribution.
    initial_weights: Path | None = fixed(None)
    model: ModelConfig = fixed(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = fixed(default_factory=OptimConfig)
    engine: EngineConfig = changeable(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = changeable(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = changeable(default_factory=RecoveryConfig)
    evaluation: EvaluationConfig = changeable(default_factory=EvaluationConfig)
    metrics: MetricsConfig = changeable(default_factory=MetricsConfig)

    def __post_init__(self) -> None:
        require_name("name", self.name)
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
