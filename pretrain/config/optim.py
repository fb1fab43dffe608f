"""Settings of the optimizer and its learning rate. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from data_pipeline.errors import ConfigError
from pretrain.config.fields import changeable, require_at_least


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate by step: linear warm-up, then `shape` down to `final_fraction` of the peak."""

    shape: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0  # wsd: length of the final decay; 0: a fifth of the run
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, "optim.schedule", self, "warmup_steps", "decay_steps")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ConfigError(
                f"optim.schedule.final_fraction={self.final_fraction:g} must be from 0 to 1"
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW or LAMB with decoupled weight decay, which leaves norms and biases alone."""

    steps: int = changeable(1000)  # may only grow
    # lamb: for very large batches; its learning rates differ from Adam's
    name: Literal["adamw", "lamb"] = "adamw"
    learning_rate: float = 2.5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.25  # 0: no clipping
    ema_decay: float = 0.0  # of an exponential moving average of the weights, say 0.999; 0: none
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        require_at_least(1, "optim", self, "steps")
        require_at_least(0, "optim", self, "learning_rate", "epsilon", "weight_decay", "clip_norm")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"optim.betas={list(self.betas)} must be at least 0 and below 1")
        if not 0.0 <= self.ema_decay < 1.0:
            raise ConfigError(
                f"optim.ema_decay={self.ema_decay} must be 0 (no average) or more and below 1"
            )
        if self.schedule.warmup_steps > self.steps:
            raise ConfigError(
                f"optim.schedule.warmup_steps={self.schedule.warmup_steps} is longer than "
                f"optim.steps={self.steps}"
            )
