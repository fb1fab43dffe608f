"""The settings of one part of a mixture, apart from what reads it: settings are read where numpy is slow to load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """A corpus and how much of it: `repeat` passes per epoch, or `weight` relative to the others' (tokens)."""

    path: Path  # a directory made by `data-pipeline build`, or the URL it was uploaded to
    repeat: float = 0.0  # 0: once, or what the weight asks for
    weight: float = 0.0  # 0: `repeat` counts; all parts of a mixture have a weight or none has

    def __post_init__(self) -> None:
        if self.repeat < 0 or self.weight < 0:
            raise ConfigError(
                f"mixture of {self.path}: repeat={self.repeat} and weight={self.weight} must be positive"
            )
        if self.repeat and self.weight:
            raise ConfigError(
                f"mixture of {self.path}: found repeat and weight, expected one of them"
            )
