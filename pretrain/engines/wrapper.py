"""An engine around another one: the base of engines that change some of its functions."""

from collections.abc import Iterator

from torch import Tensor

from data_pipeline.lanes.segment_batch import SegmentBatch
from pretrain.engines.engine import Engine, StepResult
from pretrain.model.memory import Memory
from pretrain.optim.parameter_groups import Fragment


class EngineWrapper(Engine):
    """Forwards everything to the engine that it wraps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.world, self.module, self.loss_scaler = engine.world, engine.module, engine.loss_scaler

    def forward_backward(
        self, slot: SegmentBatch, memory: Memory | None, step: int
    ) -> tuple[Tensor, Memory]:
        return self._engine.forward_backward(slot, memory, step)

    def step(self, learning_rate: float, measure_layers: bool = False) -> StepResult:
        return self._engine.step(learning_rate, measure_layers)

    def evaluate(
        self, batch: SegmentBatch, memory: Memory | None, memory_length: int, num_tokens: int = 0
    ) -> tuple[Tensor, Memory]:
        return self._engine.evaluate(batch, memory, memory_length, num_tokens)

    def fragments(self) -> Iterator[Fragment]:
        return self._engine.fragments()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._engine.whole_weights()

    def optimizer_step_count(self) -> int:
        return self._engine.optimizer_step_count()

    def after_load(self, step_count: int) -> None:
        self._engine.after_load(step_count)

    def close(self) -> None:
        self._engine.close()
        del self.module  # so that the model's memory can be freed
