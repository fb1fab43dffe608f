"""A running average of the weights beside those that are trained (Polyak and Juditsky 1992)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pretrain.engines.engine import Engine, StepResult
from pretrain.optim.fragments import Fragment

AVERAGE = "average"


class EmaEngine:
    """The engine it is given; after every update that was applied, average = decay * average + (1 - decay) * weight.

    The averages are fp32 and spread over the ranks as the weights' fragments are. They are values of those fragments,
    so a checkpoint holds them and any other number of ranks or ZeRO stage goes on with them.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        self._averages: dict[tuple[str, int], Tensor] = {}
        self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        result = self._engine.step(learning_rate, measure_layers)
        if not result.skipped:
            with torch.no_grad():
                for each in self._engine.fragments():
                    self._averages[each.name, each.start].lerp_(
                        each.values["weight"], 1.0 - self._decay
                    )
        return result

    def fragments(self) -> Iterator[Fragment]:
        for each in self._engine.fragments():
            average = self._averages[each.name, each.start]
            yield dataclasses.replace(each, values={**each.values, AVERAGE: average})

    def after_load(self, step_count: int) -> None:
        self._engine.after_load(step_count)
        if step_count == 0:
            self._begin()

    def _begin(self) -> None:
        """The average of no update is the weight itself."""
        for each in self._engine.fragments():
            self._averages[each.name, each.start] = each.values["weight"].detach().clone()
