"""What `launcher status` costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scale.costs import RANKS, RANKS_OF_NODE, Cost
from benchmarks.scale.instruments import bytes_read, counted_files
from launcher.run_state import read_state
from pretrain.config.run import RunConfig
from pretrain.rundir.heartbeat import HeartbeatRecord, node_file
from pretrain.rundir.run_dir import RunDir
from tests.helpers.metrics import train_line

STEPS = (8_000, 64_000, 500_000)  # steps that a run has made, one number for each of RANKS
STATUS_SECONDS = 2.0
FIFTY_RUNS_SECONDS = 1.0
ROUNDS = 5


def status_costs(directory: Path) -> Iterator[Cost]:
    """Yield the costs of `launcher status`."""
    opened, seconds = {}, {}
    for ranks in RANKS:
        run = RunDir.create(directory / f"run-{ranks}", RunConfig(name="run"))
        write_heartbeats(run, ranks)
        with counted_files(run.heartbeats) as counts:
            read_state(run.path)
        opened[ranks], seconds[ranks] = counts["opened"], cpu_seconds(run)
    yield Cost(
        name="status: heartbeat files opened", measured=opened, at_most=RANKS[-1] / RANKS_OF_NODE
    )
    yield Cost(
        name="status: time of one run", unit="s of CPU", measured=seconds, at_most=STATUS_SECONDS,
        detail="on a local disk; on a network one 32 files are read at a time",
    )  # fmt: skip
    amounts, seconds = {}, {}
    for steps in STEPS:
        run = RunDir.create(directory / f"long-{steps}", RunConfig(name="run"))
        write_metrics(run, steps)
        before = bytes_read()
        read_state(run.path)
        amounts[steps], seconds[steps] = bytes_read() - before, cpu_seconds(run)
    yield Cost(name="status of a long run: bytes read", of="steps", measured=amounts, targets=STEPS)
    yield Cost(
        name="status of fifty long runs", unit="s of CPU", of="steps", targets=STEPS,
        measured={steps: 50 * each for steps, each in seconds.items()},
        at_most=FIFTY_RUNS_SECONDS, detail="fifty times one",
    )  # fmt: skip


def write_heartbeats(run: RunDir, ranks: int) -> None:
    """Write the heartbeats that ranks of other nodes would write."""
    run.heartbeats.mkdir()
    for first in range(0, ranks, RANKS_OF_NODE):
        now, node = time.time(), f"node-{first}"
        records = (
            HeartbeatRecord(
                rank=rank, time=now, written=now, step=7, phase="train", hostname=node, pid=1
            )
            for rank in range(first, first + RANKS_OF_NODE)
        )
        content = b"".join(record.line for record in records)
        node_file(run.heartbeats, first).write_bytes(content)


def write_metrics(run: RunDir, steps: int) -> None:
    """Write the measurements of `steps` steps, ten of them in an interval."""
    interval = {"tokens_per_second": 8.0, "seconds": 10.0, "train_loss": 1.0, "time": 1e9}
    with run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            more = {**interval, "totals": {"training": float(step)}} if step % 10 == 0 else {}
            file.write(json.dumps(train_line(step, **more)) + "\n")


def cpu_seconds(run: RunDir) -> float:
    """Return the CPU seconds of reading a run's state, the least of a few."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        read_state(run.path)
        seconds.append(time.process_time() - start)
    return min(seconds)
