"""An exponential moving average (EMA) of the weights (Polyak and Juditsky 1992)."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from pretrain.engines.engine import Engine, StepResult
from pretrain.engines.wrapper import EngineWrapper
from pretrain.optim.parameter_groups import Fragment

EMA = "ema"  # its key in a fragment's values, beside `weight`, `exp_avg` and `exp_avg_sq`


class EmaEngine(EngineWrapper):
    """An engine around another one that keeps an EMA of its weights.

    After every update that was applied, ema = decay * ema + (1 - decay) * weight.

    The EMA is fp32 and sharded as the weights' fragments are. It is one more value of those
    fragments, so checkpoints contain it and it can be resumed at any world size and ZeRO stage.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        super().__init__(engine)
        self._decay = decay
        self._ema: dict[tuple[str, int], Tensor] = {}
        self._copy_weights()

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        result = self._engine.step(learning_rate, measure_layers)
        if not result.skipped:
            with torch.no_grad():
                for fragment in self._engine.fragments():
                    ema = self._ema[fragment.name, fragment.start]
                    ema.lerp_(fragment.values["weight"], 1.0 - self._decay)
        return result

    def fragments(self) -> Iterator[Fragment]:
        for fragment in self._engine.fragments():
            values = {**fragment.values, EMA: self._ema[fragment.name, fragment.start]}
            yield dataclasses.replace(fragment, values=values)

    def after_load(self, step_count: int) -> None:
        self._engine.after_load(step_count)
        if step_count == 0:  # initial weights were loaded, not a checkpoint
            self._copy_weights()

    def _copy_weights(self) -> None:
        """Start from the weights themselves: an average of zeros would need a bias correction."""
        for fragment in self._engine.fragments():
            self._ema[fragment.name, fragment.start] = fragment.values["weight"].detach().clone()
