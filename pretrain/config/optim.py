"""Settings of the optimizer and its learning rate. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from data_pipeline.errors import ConfigError
from data_pipeline.setting_fields import MOST, Range, check_ranges, setting
from pretrain.config.resume_rules import changeable


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate by step: linear warm-up, then `shape` down to `final_fraction` of the peak."""

    shape: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    warmup_steps: int = setting(0, Range(0, MOST))
    # wsd: length of the final decay; 0: a fifth of the run, or what warm-up leaves of it
    decay_steps: int = setting(0, Range(0, MOST))
    final_fraction: float = setting(0.0, Range(0, 1))

    def __post_init__(self) -> None:
        check_ranges("optim.schedule.", self)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW or LAMB with decoupled weight decay, which leaves norms and biases alone."""

    steps: int = changeable(1000, Range(1, MOST))  # may only grow
    # lamb: for very large batches; its learning rates differ from Adam's
    name: Literal["adamw", "lamb"] = "adamw"
    learning_rate: float = setting(2.5e-4, Range(0, 1000))
    betas: tuple[float, float] = setting((0.9, 0.999), Range(0, 1, below=True))
    epsilon: float = setting(1e-8, Range(0, 1))
    weight_decay: float = setting(0.0, Range(0, 1000))
    clip_norm: float = setting(0.25, Range(0, MOST))  # 0: no clipping
    # Of an exponential moving average of the weights, say 0.999; 0: none.
    ema_decay: float = setting(0.0, Range(0, 1, below=True))
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        check_ranges("optim.", self)
        if self.schedule.warmup_steps > self.steps:
            raise ConfigError(
                f"optim.schedule.warmup_steps={self.schedule.warmup_steps} is longer than "
                f"optim.steps={self.steps}"
            )
        left = self.steps - self.schedule.warmup_steps
        if self.schedule.shape == "wsd" and self.schedule.decay_steps > left:
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
