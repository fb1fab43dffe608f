"""Fault injection: PRETRAIN_FAULT lets a run fail at an exact step, for tests and for users.

It is KIND@STEP or KIND:NUMBER@STEP:

    sigkill@7     SIGKILL every rank right after step 7, before its checkpoint. No handler runs;
                  what was written stays, unlike in a power failure
    nan@7         make one lane's hidden states NaN in step 7
    inf@7         make gradients infinite in step 7, as a loss scale that is too large does; losses
                  stay finite
    oom:2@7       from step 7 on, run out of memory in forward passes of more than 2 lanes
    slow:0.5@7    from step 7 on, take 0.5 seconds longer for each forward pass
    sigterm-in-evaluation@7, sigkill-in-evaluation@7
                  send the process this signal in the evaluation after step 7, after two batches

All but the first affect the last rank only.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from foundation.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from data_pipeline.lanes.lane_stream import SegmentBatch
    from pretrain.engines.engine import Engine
    from pretrain.model.memory import Memory

VARIABLE = "PRETRAIN_FAULT"
IN_EVALUATION = {"sigterm-in-evaluation": signal.SIGTERM, "sigkill-in-evaluation": signal.SIGKILL}
KINDS = ("sigkill", "nan", "inf", "oom", "slow", *IN_EVALUATION)
FORM = re.compile(rf"({'|'.join(KINDS)})(?::(\d+(?:\.\d+)?))?@([1-9]\d*)")


@dataclass(frozen=True)
class Fault:
    step: int  # 0: never
    kind: str = "sigkill"
    number: float = 0.0

    def trigger(self, step: int) -> None:
        """Kill this process, after `step`, if that is the fault."""
        if self.kind == "sigkill" and step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, engine: Engine) -> Engine:
        """The engine, with the fault injected on the rank it affects."""
        is_last = engine.world.rank == engine.world.world_size - 1
        if self.step == 0 or self.kind == "sigkill" or not is_last:
            return engine
        return _FaultyEngine(engine, self)  # type: ignore[return-value]  (delegates what it lacks)


class _FaultyEngine:
    """An engine with faulty forward passes."""

    def __init__(self, engine: Engine, fault: Fault) -> None:
        self._engine = engine
        self._fault = fault
        self._steps = self._batches = 0  # made; of the evaluation after the step of the fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        import torch

        fault, number = self._fault, step + 1
        self._steps = number
        if fault.kind == "oom" and number >= fault.step and len(slot.lanes) > fault.number:
            torch.empty(1 << 60, dtype=torch.uint8, device=self._engine.world.device)
        handle = self._engine.module.get_submodule("embedding").register_forward_hook(
            lambda _module, _inputs, output: self._affect(cast("Tensor", output), number)
        )
        try:
            return self._engine.forward_backward(slot, memory, step)
        finally:
            handle.remove()

    def evaluate(
        self,
        batch: SegmentBatch,
        memory: Memory | None,
        memory_length: int,
        num_tokens: int | None = None,
    ) -> tuple[Tensor, Memory]:
        if self._steps == self._fault.step and self._fault.kind in IN_EVALUATION:
            self._batches += 1
            if self._batches == 3:
                os.kill(os.getpid(), IN_EVALUATION[self._fault.kind])
        return self._engine.evaluate(batch, memory, memory_length, num_tokens)

    def _affect(self, hidden_BLD: Tensor, number: int) -> Tensor:
        fault = self._fault
        if fault.kind == "slow" and number >= fault.step:
            time.sleep(fault.number)
        if fault.kind == "nan" and number == fault.step:
            hidden_BLD = hidden_BLD.clone()
            hidden_BLD[0] = float("nan")
        if fault.kind == "inf" and number == fault.step and hidden_BLD.requires_grad:
            hidden_BLD.register_hook(lambda gradient: gradient * float("inf"))
        return hidden_BLD


def fault_from_environment() -> Fault:
    """The fault of PRETRAIN_FAULT; none if it is unset."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return Fault(step=0)
    match = FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}={text!r}: expected KIND@STEP or KIND:NUMBER@STEP with KIND of "
            f"{', '.join(KINDS)} and STEP of 1 or more"
        )
    kind, number, step = match.groups()
    return Fault(step=int(step), kind=kind, number=float(number or 0.0))
