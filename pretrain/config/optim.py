"""Settings of the optimizer and its learning rate. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from foundation.errors import ConfigError
from foundation.settings import MOST, Range, check_ranges, setting
from pretrain.config.choices import OptimizerName, ScheduleShape

MOST_SEGMENTS = 4096


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate by step: linear warm-up, then `shape` down to `final_fraction` of the peak."""

    shape: ScheduleShape = "cosine"
    """Course of the learning rate after warm-up; wsd: constant, then a linear decay at the end."""
    warmup_steps: int = setting(0, Range(0, MOST), unit="steps")
    """Linear warm-up of the learning rate from zero."""
    decay_steps: int = setting(0, Range(0, MOST), unit="steps")
    """Length of wsd's final decay; 0: a fifth of the run, or what warm-up leaves of it."""
    final_fraction: float = setting(0.0, Range(0, 1))
    """Learning rate at the end, as a fraction of the peak."""

    def __post_init__(self) -> None:
        check_ranges("optim.schedule.", self)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, LAMB or Muon with decoupled weight decay, which leaves norms and biases alone."""

    steps: int = setting(1000, Range(1, MOST), unit="steps")
    """Updates of the run; a resume may only raise it."""
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
    """Segments of each lane in a step; through memory, later ones teach earlier; 1: the paper's."""
    ema_decay: float = setting(0.0, Range(0, 1, below=True))
    """Decay of an exponential moving average of the weights, say 0.999; 0: none."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Course of the learning rate."""

    def __post_init__(self) -> None:
        check_ranges("optim.", self)
        if self.schedule.warmup_steps > self.steps:
            raise ConfigError(
                f"optim.schedule.warmup_steps={self.schedule.warmup_steps} is longer than "
                f"optim.steps={self.steps}, which includes it; set it too, such as "
                f"optim.schedule.warmup_steps={self.steps // 20}"
            )
        left = self.steps - self.schedule.warmup_steps
        decays_last = self.schedule.shape == "wsd"
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
