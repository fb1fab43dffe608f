"""Faults asked for by name, so that proofs and tests can let a run fail at an exact step.

PRETRAIN_FAULT is KIND@STEP or KIND:NUMBER@STEP:

    sigkill@7     every rank is killed right after step 7, before any checkpoint of that step: no handler runs and
                  nothing is flushed, as when a node loses power
    nan@7         one lane's hidden states are no numbers in step 7
    inf@7         gradients are infinite in step 7, as those of too large a loss scale; the losses are not
    oom:2@7       from step 7 on a forward pass of more than 2 lanes finds no memory
    slow:0.5@7    from step 7 on every forward pass takes 0.5 seconds longer

All but the first befall the last rank alone.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from data_pipeline.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from data_pipeline.lanes.lane_stream import SegmentBatch
    from pretrain.engines.engine import Engine, Memory

VARIABLE = "PRETRAIN_FAULT"
FORM = re.compile(r"(sigkill|nan|inf|oom|slow)(?::(\d+(?:\.\d+)?))?@([1-9]\d*)")


@dataclass(frozen=True)
class Fault:
    step: int  # 0: never
    kind: str = "sigkill"
    number: float = 0.0

    def trigger(self, step: int) -> None:
        """End this process without warning if `step` is the one asked for."""
        if self.kind == "sigkill" and step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, engine: Engine) -> Engine:
        """The engine, with the fault in it on the rank it befalls."""
        if (
            self.step == 0
            or self.kind == "sigkill"
            or engine.world.rank < engine.world.world_size - 1
        ):
            return engine
        return _FaultyEngine(engine, self)  # type: ignore[return-value]  (delegates what it lacks)


class _FaultyEngine:
    """The engine it is given, but for forward passes that the fault befalls."""

    def __init__(self, engine: Engine, fault: Fault) -> None:
        self._engine = engine
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        import torch

        fault, number = self._fault, step + 1
        if fault.kind == "oom" and number >= fault.step and len(slot.lanes) > fault.number:
            raise torch.OutOfMemoryError(f"planted: {len(slot.lanes)} lanes in step {number}")
        handle = self._engine.module.get_submodule("embedding").register_forward_hook(
            lambda _module, _inputs, output: self._befallen(cast("Tensor", output), number)
        )
        try:
            return self._engine.forward_backward(slot, memory, step)
        finally:
            handle.remove()

    def _befallen(self, hidden_BLD: Tensor, number: int) -> Tensor:
        if self._fault.kind == "slow" and number >= self._fault.step:
            time.sleep(self._fault.number)
        if self._fault.kind == "nan" and number == self._fault.step:
            hidden_BLD = hidden_BLD.clone()
            hidden_BLD[0] = float("nan")
        if self._fault.kind == "inf" and number == self._fault.step and hidden_BLD.requires_grad:
            hidden_BLD.register_hook(lambda gradient: gradient * float("inf"))
        return hidden_BLD


def fault_from_environment() -> Fault:
    """Read PRETRAIN_FAULT; no fault when it is unset."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return Fault(step=0)
    match = FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}={text!r} is not of the form KIND@STEP or KIND:NUMBER@STEP with KIND sigkill, nan, inf, oom or "
            "slow and STEP of 1 or more"
        )
    kind, number, step = match.groups()
    return Fault(step=int(step), kind=kind, number=float(number or 0.0))
