"""Every setting of a run, as frozen dataclasses read from YAML by `foundation.settings`.

Torch-free: the launcher reads these on a login node. What can be derived is a property, not a
setting. `why_fixed` says what a resume may not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from data_pipeline.config import LARGEST_SEED, MOST_LANES, MOST_ROWS, CacheConfig, MixturePart
from foundation.errors import ConfigError
from foundation.paths import url_of
from foundation.settings import (
    MOST,
    Range,
    check_ranges,
    require_hash,
    require_name,
    require_no_secrets,
    require_object_store,
    setting,
)
from pretrain.config.engine import EngineConfig, check_attention
from pretrain.config.model import ModelConfig, OptimizerName, ScheduleShape
from pretrain.config.other_names import OTHER_NAMES

MOST_SEGMENTS = 4096
MOST_COMPILED_LENGTHS = 8  # of rows, by default: each takes ten seconds or more
LEAST_SCORED_TOKENS = 100_000  # scored at least by the last evaluation, whose losses tables quote
# Settings and sections that a resume may not change -> why.
_FIXED = {
    "name": "a run keeps its name",
    "seed": "weights, dropout and the order of text follow from it",
    "initial_weights": "the run has trained since",
    "model": "the weights are of this model",
    "data.mixture": "give data.phases another one from a step on",
    "data.lanes": "give data.phases other ones from a step on",
    "data.segment_length": "give data.phases another one from a step on",
    "optim.name": "the saved state belongs to this optimizer",
    "optim.gradient_segments": "cursors and rewinds count steps of this length",
    "optim.ema_decay": "the average has been kept with it",
    "engine.kind": "another engine rounds differently",
}
# Sections whose changes by a resume hold from its step on: earlier updates keep the old settings,
# also when the run makes them again.
OF_UPDATES = ("optim.", "recovery.")
OF_RATE = ("optim.steps", "optim.learning_rate", "optim.schedule.")  # they make one course


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate by step: linear warm-up, then `shape` down to `final_fraction` of the peak."""

    shape: ScheduleShape = "cosine"
    """Course of the learning rate after warm-up; wsd: constant, then a linear decay at the end."""
    warmup_steps: int = setting(0, Range(0, MOST), unit="steps")
    """Linear warm-up of the learning rate from zero."""
    decay_steps: int = setting(0, Range(0, MOST), unit="steps")
    """Length of wsd's final decay; 0: a fifth of the run, at most all steps after warm-up."""
    final_fraction: float = setting(0.0, Range(0, 1))
    """Learning rate at the end, as a fraction of the peak."""

    def __post_init__(self) -> None:
        check_ranges("optim.schedule.", self)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, LAMB or Muon with decoupled weight decay, which leaves norms and biases alone."""

    steps: int = setting(1000, Range(1, MOST), unit="steps")
    """Updates of the run."""
    name: OptimizerName = "adamw"
    """Optimizer; lamb is for very large batches, muon makes the updates of matrices orthogonal."""
    learning_rate: float = setting(2.5e-4, Range(0, 1000))
    """Learning rate at the peak, after warm-up."""
    betas: tuple[float, float] = setting((0.9, 0.999), Range(0, 1, below=True))
    """Decay of the averages of gradients and of their squares."""
    epsilon: float = setting(1e-8, Range(0, 1))
    """Added to the divisor of an update."""
    weight_decay: float = setting(0.0, Range(0, 1000))
    """Decoupled weight decay, which leaves norms and biases alone."""
    clip_norm: float = setting(0.25, Range(0, MOST))
    """Largest norm of a gradient; larger ones are scaled down to it; 0: no clipping."""
    gradient_segments: int = setting(1, Range(1, MOST_SEGMENTS), unit="segments")
    """Segments of a lane in a step, between which gradients flow through memory; 1: the paper's."""
    ema_decay: float = setting(0.0, Range(0, 1, below=True))
    """Decay of an exponential moving average of the weights, say 0.999; 0: none."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Course of the learning rate."""

    def __post_init__(self) -> None:
        check_ranges("optim.", self)
        if self.schedule.warmup_steps > self.steps:
            raise ConfigError(
                f"optim.schedule.warmup_steps={self.schedule.warmup_steps} is longer than "
                f"optim.steps={self.steps}, which includes warm-up; set a shorter one, such as "
                f"optim.schedule.warmup_steps={self.steps // 20}"
            )
        left = self.steps - self.schedule.warmup_steps
        decays_last = self.schedule.shape == "wsd"
        if self.schedule.decay_steps and not decays_last:
            raise ConfigError(
                f"optim.schedule.decay_steps={self.schedule.decay_steps} is for shape=wsd, found "
                f"shape={self.schedule.shape}; set optim.schedule.decay_steps=0, or shape=wsd"
            )
        if decays_last and self.schedule.decay_steps > left:
            raise ConfigError(
                f"optim.schedule.decay_steps={self.schedule.decay_steps} is longer than the {left} "
                "steps that warm-up leaves: the rate would drop before the decay; use "
                f"{left} or less"
            )

    @property
    def decay_steps(self) -> int:
        """The length of wsd's final decay."""
        left = self.steps - self.schedule.warmup_steps
        return self.schedule.decay_steps or max(1, min(self.steps // 5, left))


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """What changes from a step on; what is not set stays as before.

    With other lanes or another mixture the lanes restart, and memories are kept only if the number
    of lanes stays. With another segment length alone every lane continues, with its memory.
    """

    from_step: int = setting(allowed=Range(1, MOST), unit="steps")
    """Number of updates before the phase starts."""
    lanes: int = setting(0, Range(0, MOST_LANES), unit="lanes")
    """Lanes from then on; 0: as before."""
    segment_length: int = setting(0, Range(0, MOST_ROWS), unit="tokens")
    """Tokens of a segment from then on; 0: as before."""
    mixture: tuple[MixturePart, ...] = ()
    """Corpora from then on; []: as before."""

    def __post_init__(self) -> None:
        check_ranges("data.phases.", self)
        if not (self.lanes or self.segment_length or self.mixture):
            raise ConfigError(
                f"the phase of data.phases from step {self.from_step} on changes nothing; expected "
                "lanes, a segment length or a mixture"
            )

    @property
    def restarts_lanes(self) -> bool:
        """Return whether the phase has other lanes than the previous one."""
        return bool(self.lanes or self.mixture)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which corpus, in how many lanes. A segment is `lanes` rows of `segment_length` tokens."""

    path: Path = Path("data")
    """Corpus: its directory (relative to the working directory) or URL; a resume may change it."""
    manifest_hashes: tuple[str, ...] = ()
    """Each corpus must have one of these hashes; `data-pipeline inspect` shows them; []: any."""
    mixture: tuple[MixturePart, ...] = ()
    """Corpora to train on instead of `path`, which still gives tokenizer and validation split."""
    lanes: int = setting(16, Range(1, MOST_LANES), unit="lanes")
    """Streams of text read side by side over all ranks: the rows of a batch."""
    segment_length: int = setting(64, Range(1, MOST_ROWS), unit="tokens")
    """Tokens of a segment; in a step each lane reads one, or `optim.gradient_segments`."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Cache of corpora named by a URL."""
    phases: tuple[PhaseConfig, ...] = ()
    """Other lanes, segments or corpora from given steps on; a resume may change later ones."""

    def __post_init__(self) -> None:
        check_ranges("data.", self)
        require_no_secrets("data.path", self.path)
        for sha256 in self.manifest_hashes:
            require_hash("data.manifest_hashes", sha256, "`data-pipeline inspect`")
        steps = [phase.from_step for phase in self.phases]
        if sorted(set(steps)) != steps:
            raise ConfigError(
                f"data.phases start at the steps {steps}; expected each to start after the previous"
            )

    @property
    def all_parts(self) -> tuple[MixturePart, ...]:
        """The parts of every mixture, also of those that phases change to."""
        return (*self.mixture, *(part for phase in self.phases for part in phase.mixture))

    def directory(self) -> Path:
        """Return where to read the corpus: `path`, or this node's cache of a URL.

        Fetches the manifests and the tokenizer of a URL. DataError if there are `manifest_hashes`
        and the corpus has none of them.
        """
        if url_of(self.path) is None and not self.manifest_hashes:
            return self.path
        from data_pipeline.corpora.corpus_identity import pinned_directory

        return pinned_directory(self.path, self.cache, self.manifest_hashes)


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What a run does on its own about anomalous gradients and losses.

    A loss is anomalous if it is `spike_threshold` robust standard deviations above the median of
    the last 50 losses, or above the loss of untrained weights. If losses stay there, or updates are
    skipped, for 20 steps in a row, the run rewinds to the checkpoint before the first of them and
    skips their data. If more than half of the last 50 updates were skipped, the run stops.
    """

    skip_grad_norm: float = setting(0.0, Range(0, MOST))
    """Skip steps whose gradient has a larger norm; 0: only those with a non-finite norm."""
    spike_threshold: float = setting(8.0, Range(0.1, 1e6, zero=True))
    """Robust standard deviations above the median that make a loss anomalous; 0: recovery off."""
    max_rewinds: int = setting(3, Range(0, 1_000_000), unit="rewinds")
    """Rewinds after which the run stops, with a report."""

    def __post_init__(self) -> None:
        check_ranges("recovery.", self)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often a run saves, and which checkpoints are kept: the latest and those named here."""

    interval: int = setting(200, Range(1, MOST), unit="steps")
    """Steps between two checkpoints."""
    asynchronous: bool = True
    """Write in the background, from a copy in host memory."""
    keep_last: int = setting(3, Range(1, MOST), unit="checkpoints")
    """Latest checkpoints that are kept."""
    keep_every: int = setting(0, Range(0, MOST), unit="steps")
    """Keep also every checkpoint whose step is a multiple of this; 0: none."""
    storage_patience_seconds: float = setting(1800.0, Range(0, 1e7), unit="seconds")
    """How long to train on and retry while the run directory cannot be written; 0: stop at once."""
    local: Path | None = None
    """Absolute path on each node's own disk, for local checkpoints between the others."""
    local_interval: int = setting(50, Range(1, MOST), unit="steps")
    """Steps between two local checkpoints; below `interval`."""
    mirror: str = ""
    """Object store (s3://BUCKET/runs): checkpoints are uploaded below the run's name; "": none."""

    def num_kept(self, steps: int) -> int:
        """The most checkpoints that are kept after this many steps."""
        return self.keep_last + (steps // self.keep_every if self.keep_every else 0)

    def __post_init__(self) -> None:
        check_ranges("checkpoint.", self)
        if self.mirror:
            require_object_store("checkpoint.mirror", self.mirror)
        if self.local is None:
            return
        if not self.local.is_absolute():
            raise ConfigError(
                f"checkpoint.local: found {self.local}, expected an absolute path, the same on "
                "every node"
            )
        if self.local_interval >= self.interval:
            raise ConfigError(
                f"checkpoint.local_interval={self.local_interval} must be below "
                f"checkpoint.interval={self.interval}: local checkpoints come between the others"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When the validation loss is measured, and on how much text."""

    interval: int = setting(200, Range(0, MOST), unit="steps")
    """Steps between two evaluations; 0: only at the end."""
    lanes: int = setting(8, Range(1, MOST_LANES), unit="lanes")
    """Streams that read the documents of the validation split side by side, over all ranks."""
    max_tokens: int = setting(100_000, Range(0, MOST), unit="tokens")
    """Tokens to score, at starts of documents; 0: all; the last evaluation: 100,000 or more."""
    sets: dict[str, Path] = field(default_factory=dict)
    """Corpora whose validation loss is measured as well, under these names: {name: path}."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval that each evaluation runs as well: names, or YAML files."""
    tasks_limit: int = setting(0, Range(0, MOST), unit="examples")
    """Examples of each task; 0: all."""

    def scored_tokens(self, is_last: bool) -> int:
        """Return the most tokens that an evaluation scores; 0: all. Tables quote the last one."""
        fewest = LEAST_SCORED_TOKENS if is_last and self.max_tokens else 0
        return max(self.max_tokens, fewest)

    def __post_init__(self) -> None:
        check_ranges("evaluation.", self)
        for name, path in self.sets.items():
            require_name("evaluation.sets", name)
            require_no_secrets(f"evaluation.sets.{name}", path)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What is measured while a run trains."""

    interval: int = setting(10, Range(1, MOST), unit="steps")
    """Steps between two lines of measurements."""
    tensorboard: bool = True
    """Write event files for TensorBoard."""
    wandb_project: str = ""
    """Project of Weights & Biases that gets a copy; empty: none. Needs the extra `wandb`."""
    profile_steps: tuple[int, int] = setting((0, 0), Range(0, MOST), unit="steps")
    """First and last step of rank 0's profile; zeros: none."""

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

    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES

    name: str = "run"
    """Name of the run, of its directory in `runs/` and of its Slurm jobs."""
    seed: int = setting(1, Range(0, LARGEST_SEED))
    """Seed of weights, dropout and the lanes' order."""
    initial_weights: Path | None = None
    """Export or RUN@STEP to start from (relative to the working directory); null: draw them."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and batches."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer, number of steps and learning rate."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Sharding, precision and devices."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """Recovery from loss spikes and bad gradients."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Validation."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Measurements."""

    def __post_init__(self) -> None:
        check_ranges("", self)
        require_name("name", self.name)
        if self.evaluation.tasks and self.engine.kind == "deepspeed" and self.engine.zero_stage > 2:
            raise ConfigError(
                "evaluation.tasks needs a rank with whole weights, engine.zero_stage=3 shards "
                "them; use stage 2, or `pretrain evaluate RUN --tasks` on checkpoints"
            )
        check_attention(self.engine, self.model)
        if self.model.adopted:
            self._check_adopted()
        if self.engine.compiles and not self._is_compilable:
            raise ConfigError(
                "engine.compile=true needs model.dropout=0, found "
                f"{self.model.dropout:g}, and with engine.zero_stage=3 optim.gradient_segments=1, "
                f"found {self.optim.gradient_segments}; change them or do not compile"
            )
        if self.model.memory_tokens and self.optim.gradient_segments < 2:
            raise ConfigError(
                f"model.memory_tokens={self.model.memory_tokens} needs optim.gradient_segments of "
                "2 or more, found 1: only a later segment's loss teaches what to write"
            )

    def _check_adopted(self) -> None:
        """Raise ConfigError for settings that are only for models of this project."""
        if self.initial_weights is None:
            raise ConfigError("model.adopted needs initial_weights, its directory of Hugging Face")
        used = {
            "engine.compile": self.engine.compiles,
            "engine.logits_chunk_tokens": self.engine.logits_chunk_tokens,
            "engine.activation_checkpointing": self.engine.activation_checkpointing != "none",
        }
        if name := next((name for name, value in used.items() if value), ""):
            raise ConfigError(f"{name} is for models of this project; leave it out")
        if self.engine.zero_stage > 2 and self.optim.gradient_segments > 1:
            raise ConfigError(
                f"optim.gradient_segments={self.optim.gradient_segments} of an adopted model needs "
                "engine.zero_stage of 2 or less, found 3"
            )

    @property
    def _is_compilable(self) -> bool:
        has_segments = self.engine.zero_stage > 2 and self.optim.gradient_segments > 1
        return not (self.model.dropout or has_segments)

    @property
    def compiles_if_possible(self) -> bool:
        """Whether a GPU compiles this run unless told otherwise: each length of a memory that fills
        is compiled anew, so few.
        """
        lengths = 1 + -(-self.model.longest_memory // self.data.segment_length)
        return self._is_compilable and not self.model.adopted and lengths <= MOST_COMPILED_LENGTHS

    @property
    def lane_tokens_per_step(self) -> int:
        """Tokens that each lane reads in a step, in `optim.gradient_segments` segments."""
        return self.data.segment_length * self.optim.gradient_segments

    @property
    def tokens_per_step(self) -> int:
        return self.data.lanes * self.lane_tokens_per_step


def why_fixed(key: str) -> str:
    """Return why a setting, such as `model.d_model`, may not change at a resume; '' if it may."""
    return next((why for name, why in _FIXED.items() if f"{key}.".startswith(f"{name}.")), "")


def lanes_of_rank(run: RunConfig, rank: int, world_size: int) -> range:
    """Return the contiguous lanes that `rank` reads; ConfigError if they do not divide evenly.

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
    """Return how many slots a rank has: fixed groups of lanes, each with its own memory."""
    per_rank = len(lanes_of_rank(run, 0, world_size))
    micro = min(run.engine.micro_batch_lanes or per_rank, per_rank)
    if per_rank % micro:
        raise ConfigError(
            f"engine.micro_batch_lanes={micro} does not divide the {per_rank} lanes of each rank; "
            f"use a divisor of {per_rank}"
        )
    return per_rank // micro
