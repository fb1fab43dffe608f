"""An engine with a fault in its forward passes (`faults.py`)."""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.engines.engine import Engine
from pretrain.engines.wrapper import EngineWrapper
from pretrain.model.memory import Memory
from pretrain.recovery.faults import IN_EVALUATION, SHORT_EVALUATION, Fault


def with_fault(engine: Engine, fault: Fault) -> Engine:
    """Return the engine, with the fault injected on the rank that it affects."""
    is_last = engine.world.rank == engine.world.world_size - 1
    affects_passes = fault.step > 0 and fault.kind not in ("sigkill", SHORT_EVALUATION)
    return FaultyEngine(engine, fault) if affects_passes and is_last else engine


class FaultyEngine(EngineWrapper):
    """The engine of the rank that a fault affects."""

    def __init__(self, engine: Engine, fault: Fault) -> None:
        super().__init__(engine)
        self._fault = fault
        self._steps = 0  # steps begun, the present one included
        self._batches = 0  # begun in the evaluation after the step of the fault

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        fault, self._steps = self._fault, step + 1
        if fault.kind == "oom" and self._steps >= fault.step and len(slot.lanes) > fault.number:
            torch.empty(1 << 60, dtype=torch.uint8, device=self.world.device)
        handle = self.module.get_submodule("embedding").register_forward_hook(self._affect)
        try:
            return super().forward_backward(slot, memory, step)
        finally:
            handle.remove()

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int, num_tokens: int = 0
    ) -> tuple[Tensor, Memory]:
        if self._steps == self._fault.step and self._fault.kind in IN_EVALUATION:
            self._batches += 1
            if self._batches == 3:
                os.kill(os.getpid(), IN_EVALUATION[self._fault.kind])
        return super().evaluate(batch, memory, memory_length, num_tokens)

    def _affect(self, _module: nn.Module, _inputs: Any, hidden_BLD: Any) -> Tensor:
        fault, step = self._fault, self._steps
        if fault.kind == "slow" and step >= fault.step:
            time.sleep(fault.number)
        if fault.kind == "nan" and step == fault.step:
            hidden_BLD = hidden_BLD.clone()
            hidden_BLD[0] = float("nan")
        if fault.kind == "inf" and step == fault.step and hidden_BLD.requires_grad:
            hidden_BLD.register_hook(lambda gradient: gradient * float("inf"))
        return hidden_BLD
