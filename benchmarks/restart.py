"""Where the time goes between starting a process and the end of its first step, for a 100M-parameter model.

    python -m benchmarks.restart CORPUS RUN     does what a start does, and prints the seconds of each part

Each start is a process of its own, as after a crash. What compiling Python's bytecode anew costs is seen with an empty
cache of it, as in a fresh container.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

from pretrain.terminal.text import markdown_table

ROUNDS = 3
PARTS = (
    "interpreter and imports",
    "engine, with DeepSpeed's import",
    "checkpoint read and checked",
    "data",
    "first step",
)
BYTECODE = "bytecode, where it is not cached"


def restart_table() -> str:
    """Seconds and share of each part, medians of some starts, as a Markdown table."""
    from tests.helpers.corpora import make_tiny_corpus

    with tempfile.TemporaryDirectory(prefix="bench-restart-") as name:
        corpus, run, bytecode = (
            make_tiny_corpus(Path(name) / "corpus"),
            Path(name) / "run",
            Path(name) / "bytecode",
        )
        _start(corpus, run)  # writes the checkpoint
        starts = [_start(corpus, run) for _ in range(ROUNDS)]
        uncached = _start(corpus, run, {"PYTHONPYCACHEPREFIX": str(bytecode)})
    seconds = {part: statistics.median(start[part] for start in starts) for part in PARTS}
    compiling = max(0.0, sum(uncached[part] - seconds[part] for part in PARTS[:2]))
    return _table(seconds, compiling)


def _table(seconds: dict[str, float], compiling: float) -> str:
    whole = sum(seconds.values())
    rows = [("restart to first step", "seconds", "share")]
    rows += [(part, f"{taken:.2f}", f"{taken / whole:.0%}") for part, taken in seconds.items()]
    rows += [
        ("together", f"{whole:.2f}", "100%"),
        (f"besides: {BYTECODE}", f"{compiling:.2f}", f"{compiling / whole:.0%}"),
    ]
    return markdown_table(rows)


def _start(corpus: Path, run: Path, environment: dict[str, str] | None = None) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.restart", str(corpus), str(run)]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    done = subprocess.run(
        command,
        env={**inherited, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def start(corpus: Path, run: Path) -> dict[str, float]:
    """Do what a start does, to the end of its first step; seconds of each part. Saves if there was no checkpoint."""
    from benchmarks.saving import bench_run
    from data_pipeline.corpora.corpus import Corpus
    from data_pipeline.lanes.lane_stream import LaneStream
    from pretrain.checkpoint.checkpointer import Checkpointer
    from pretrain.distributed.world import init_world
    from pretrain.run import (
        build_engine,
        run_training,  # noqa: F401  (all that a start imports)
        set_threads,
    )
    from pretrain.state import TrainState

    moments = [psutil.Process().create_time(), time.time()]
    config = bench_run(corpus)
    set_threads(config)
    world = init_world()
    engine = build_engine(config, world)
    moments.append(time.time())
    checkpointer = Checkpointer(config, run, world, "bench", "bench")
    found = checkpointer.restore_latest(engine)
    state = found or TrainState.fresh(num_slots=1)
    moments.append(time.time())
    split, data = Corpus.open(corpus / "train"), config.data
    batch = next(
        LaneStream(
            split, data.lanes, config.seed, data.segment_length, range(data.lanes), state.cursor
        )
    )
    moments.append(time.time())
    _, state.memories[0] = engine.forward_backward(batch, state.memories[0], state.step)
    engine.step(config.optim.learning_rate)
    moments.append(time.time())
    if found is None:
        state.step, state.cursor = 1, batch.cursor
        checkpointer.save(engine, state)
        checkpointer.finish()
    return {
        part: after - before for part, (before, after) in zip(PARTS, pairwise(moments), strict=True)
    }


if __name__ == "__main__":
    from pretrain.cli import end_process

    print(json.dumps(start(Path(sys.argv[1]), Path(sys.argv[2]))))
    end_process(0)
