"""How long the loop stands still for a save of a 100M-parameter model: blocking, and beside training.

Beside training it stands still twice: until the thread has begun, and before the next update for what is not copied by
then. The forward and backward passes in between are not counted, nor is the writing that goes on afterwards.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.compare import Comparison
from data_pipeline.lanes.lane_stream import SegmentBatch
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.config.run import DataConfig, EngineConfig, ModelConfig, RunConfig
from pretrain.distributed.world import init_world
from pretrain.engines.engine import Engine
from pretrain.run import build_engine
from pretrain.state import TrainState

GOAL = 20.0  # the stall at most 5 % of a blocking save
SEGMENT = 64


def bench_run(corpus: Path = Path("data"), engine: EngineConfig | None = None) -> RunConfig:
    """A hundred million parameters, and little to compute with them."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=300, num_layers=13, d_model=768, num_heads=12, memory_length=SEGMENT
        ),
        data=DataConfig(path=corpus, lanes=1, segment_length=SEGMENT),
        engine=engine or EngineConfig(),
    )


def saving_comparisons() -> list[Comparison]:
    """The model is built at the first call: with its moments and a copy in host memory it takes three gigabytes."""
    built: list[SavingLoop] = []

    def loop() -> SavingLoop:
        if not built:
            built.append(SavingLoop())
        return built[0]

    return [
        Comparison(
            name="stall of a save beside training, 100M parameters, against a blocking one",
            goal=GOAL,
            baseline=lambda: loop().removing(loop().blocking_save),
            candidate=lambda: loop().removing(loop().stall_of_asynchronous_save),
            rounds=3,
            own_clock=True,
        )
    ]


class SavingLoop:
    """As much of the loop as saving has to do with."""

    def __init__(self) -> None:
        run = bench_run(engine=EngineConfig(kind="torch"))
        world = init_world()
        self._root = Path(tempfile.gettempdir()) / f"bench-saving-{os.getpid()}"
        self._engine: Engine = build_engine(run, world)
        self._checkpointer = Checkpointer(run, self._root, world, "bench", "bench")
        self._state = TrainState.fresh(num_slots=1)
        tokens_BT = np.random.RandomState(0).randint(0, run.model.vocab_size, (1, SEGMENT + 1))
        starts_BL = np.zeros((1, SEGMENT), bool)
        self._batch = SegmentBatch(tokens_BT[:, :-1], tokens_BT[:, 1:], starts_BL, range(1))
        self._pass()

    def removing(self, save: Callable[[], float]) -> float:
        """What `save` says, and nothing left on the disk."""
        try:
            return save()
        finally:
            shutil.rmtree(self._root)

    def blocking_save(self) -> float:
        """Seconds until the checkpoint is published."""
        begin = time.perf_counter()
        self._checkpointer.save(self._engine, self._state)
        self._checkpointer.finish()
        return time.perf_counter() - begin

    def stall_of_asynchronous_save(self) -> float:
        """Seconds in which the loop does nothing else."""
        begin = time.perf_counter()
        self._checkpointer.save(self._engine, self._state)
        begun = time.perf_counter()
        self._pass()
        passed = time.perf_counter()
        self._checkpointer.wait_for_copy()
        copied = time.perf_counter()
        self._checkpointer.finish()
        return (begun - begin) + (copied - passed)

    def _pass(self) -> None:
        memory = self._state.memories[0]
        _, self._state.memories[0] = self._engine.forward_backward(self._batch, memory, step=0)
