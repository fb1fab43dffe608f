"""What a checkpoint of a 100M-parameter model costs: the stall of a save, the parts of a restart.

`python -m benchmarks.model.checkpoints CORPUS RUN` starts a run and prints each part's seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil

from benchmarks.measure import Comparison, Measurement
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from data_pipeline.lanes.segment_batch import SegmentBatch
from foundation.programs import own_command
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.resume_point import find_resume_point
from pretrain.config.run import DataConfig, EngineConfig, ModelConfig, RunConfig
from pretrain.distributed.world import init_world
from pretrain.engines.engine import Engine
from pretrain.run import build_engine, set_threads_of_rank
from pretrain.state import TrainState

SAVE_GOAL = 20.0  # a blocking save over the stall of an asynchronous one
SEGMENT = 64
STARTS = 3
PARTS = (
    "interpreter and imports",
    "engine, with DeepSpeed's import",
    "checkpoint verified",
    "checkpoint read",
    "data",
    "first step",
)


def bench_run(corpus: Path = Path("data"), engine: EngineConfig | None = None) -> RunConfig:
    """Return a model of a hundred million parameters whose steps are quick."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=300, num_layers=13, d_model=768, num_heads=12, memory_length=SEGMENT
        ),
        data=DataConfig(path=corpus, lanes=1, segment_length=SEGMENT),
        engine=engine or EngineConfig(),
    )


def save_comparison() -> Comparison:
    """Return the comparison of an asynchronous save's stall with a blocking save."""
    # Built at the first call: with its moments and a copy in host memory it takes three gigabytes.
    loop = cache(SavingLoop)
    return Comparison(
        name="stall of a save during training, 100M parameters, against a blocking one",
        goal=SAVE_GOAL,
        baseline=lambda: loop().removing(loop().blocking_save),
        candidate=lambda: loop().removing(loop().stall_of_asynchronous_save),
        rounds=3,
    )


class SavingLoop:
    """The parts of the training loop that a save involves."""

    def __init__(self) -> None:
        run = bench_run(engine=EngineConfig(kind="torch"))
        world = init_world()
        self._root = Path(tempfile.gettempdir()) / f"bench-saving-{os.getpid()}"
        self._engine: Engine = build_engine(run, world)
        self._checkpointer = Checkpointer(run, Disk(self._root, "bench", "bench"), world)
        self._state = TrainState.fresh(num_slots=1)
        tokens_BT = np.random.RandomState(0).randint(0, run.model.vocab_size, (1, SEGMENT + 1))
        starts_BL = np.zeros((1, SEGMENT), bool)
        self._batch = SegmentBatch(tokens_BT[:, :-1], tokens_BT[:, 1:], starts_BL, range(1))
        self._pass()

    def removing(self, save: Callable[[], float]) -> float:
        """Return what `save` returns, after removing its files."""
        try:
            return save()
        finally:
            shutil.rmtree(self._root, ignore_errors=True)

    def blocking_save(self) -> float:
        """Return the seconds until the checkpoint is published."""
        start = time.perf_counter()
        self._checkpointer.save(self._engine, self._state)
        self._checkpointer.finish()
        return time.perf_counter() - start

    def stall_of_asynchronous_save(self) -> float:
        """Return the seconds in which the loop waits.

        It waits until the thread has started, and before the next update until all is copied. The
        passes in between do not count, nor does the writing afterwards.
        """
        start = time.perf_counter()
        self._checkpointer.save(self._engine, self._state)
        started = time.perf_counter()
        self._pass()
        passed = time.perf_counter()
        self._checkpointer.wait_for_copy()
        copied = time.perf_counter()
        self._checkpointer.finish()
        return (started - start) + (copied - passed)

    def _pass(self) -> None:
        memory = self._state.memories[0]
        _, self._state.memories[0] = self._engine.forward_backward(self._batch, memory, step=0)


def restart_times(directory: Path) -> Iterator[Measurement]:
    """Yield the seconds of each part between a process' start and the end of its first step.

    Each start is a process of its own, as after a crash. An empty cache of bytecode, as in a fresh
    container, shows what compiling costs.
    """
    from tests.helpers.corpora import make_tiny_corpus

    corpus, run = make_tiny_corpus(directory / "corpus"), directory / "run"
    _start(corpus, run)  # writes the checkpoint
    starts = [_start(corpus, run) for _ in range(STARTS)]
    uncached = _start(corpus, run, {"PYTHONPYCACHEPREFIX": str(directory / "bytecode")})
    seconds = {part: [start[part] for start in starts] for part in PARTS}
    whole = [sum(start.values()) for start in starts]
    for part, values in seconds.items():
        fraction = statistics.median(values) / statistics.median(whole)
        yield Measurement(f"restart: {part}", values, "s", detail=f"{fraction:.0%} of the restart")
    yield Measurement("restart to first step", whole, "s")
    compiling = sum(uncached[part] - statistics.median(seconds[part]) for part in PARTS[:2])
    yield Measurement("restart: extra if no bytecode is cached", [max(0.0, compiling)], "s")


def _start(corpus: Path, run: Path, environment: dict[str, str] | None = None) -> dict[str, float]:
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {name: value for name, value in os.environ.items() if name not in ranks}
    done = subprocess.run(
        own_command("benchmarks.model.checkpoints", str(corpus), str(run)),
        env={**inherited, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def start(corpus: Path, run: Path) -> dict[str, float]:
    """Do what a start does, to the end of its first step; return the seconds of each part.

    Saves a checkpoint afterwards if there was none.
    """
    moments = [psutil.Process().create_time(), time.time()]
    config = bench_run(corpus)
    set_threads_of_rank()
    world = init_world()
    engine = build_engine(config, world)
    moments.append(time.time())
    found = find_resume_point(run, world, "bench")
    moments.append(time.time())
    checkpointer = Checkpointer(config, Disk(run, "bench", "bench"), world)
    state = checkpointer.restore(engine, found) if found else TrainState.fresh(num_slots=1)
    moments.append(time.time())
    split, data = Corpus.open(corpus / "train"), config.data
    lanes = range(data.lanes)
    stream = LaneStream(split, data.lanes, config.seed, data.segment_length, lanes, state.cursor)
    batch = next(stream)
    moments.append(time.time())
    _, state.memories[0] = engine.forward_backward(batch, state.memories[0], state.step)
    engine.step(config.optim.learning_rate)
    moments.append(time.time())
    if found is None:
        state.step, state.cursor = 1, batch.cursor
        checkpointer.save(engine, state)
        checkpointer.finish()
    durations = (after - before for before, after in pairwise(moments))
    return dict(zip(PARTS, durations, strict=True))


if __name__ == "__main__":
    from pretrain.cli import end_process

    print(json.dumps(start(Path(sys.argv[1]), Path(sys.argv[2]))))
    end_process(0)
