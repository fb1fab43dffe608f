"""What a run directory shows at one moment: ledger, metrics, heartbeats, locks, checkpoints. Reads.

Changes nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.directory import MARKER, step_directory
from pretrain.checkpoint.marker import latest_step
from pretrain.rundir import ledger as ledgers
from pretrain.rundir.heartbeat import HeartbeatRecord, read_heartbeats
from pretrain.rundir.lock import Lock
from pretrain.rundir.metrics_file import measurement_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Event

RECENT_INTERVALS = 5  # the reported speed is their median
# In which a loss is looked for: the very last line may be cut short, or of a step without a loss.
_LAST_LINES = 20


@dataclass(frozen=True, kw_only=True)
class MetricsSummary:
    """What metrics.jsonl contains in all."""

    step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0  # in productive steps


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that the state of a run is inferred from."""

    now: float
    ledger: Sequence[Event]
    metrics: MetricsSummary
    heartbeats: Sequence[HeartbeatRecord]
    locks: Sequence[Lock]
    checkpoint: int | None  # step of the latest one
    checkpoint_time: float | None
    steps: int  # that the run has to make
    is_beating: bool = False  # its heartbeats changed between two looks

    @property
    def latest_step(self) -> int:
        """The latest step known, whether or not a checkpoint holds it."""
        steps = (heartbeat.step for heartbeat in self.heartbeats)
        return max([self.metrics.step, self.checkpoint or 0, *steps])

    @property
    def last_seen(self) -> float:
        """When the run last wrote anything: a killed run cannot write when it ended."""
        times = [event.time for event in self.ledger[-1:]]
        times += [heartbeat.written for heartbeat in self.heartbeats]
        return max([*times, self.checkpoint_time or 0.0])

    def goodput(self, is_running: bool) -> float | None:
        """The fraction of the run's time spent in productive steps; None before the first one."""
        end = self._clock if is_running else self.last_seen
        return ledgers.goodput(self.metrics.seconds, ledgers.elapsed_seconds(self.ledger, end))

    @property
    def _clock(self) -> float:
        """What the time is where the run is: its events have times of that clock, not of ours."""
        is_elsewhere = any(each.is_alive is None for each in self.heartbeats)
        return self.last_seen if is_elsewhere else self.now


def gather(run_dir: RunDir, steps: int, is_beating: bool = False) -> Evidence:
    """Read the directory of a run that has to make `steps` steps."""
    latest = latest_step(run_dir.checkpoints) or None
    saved = None if latest is None else _time_saved(step_directory(run_dir.checkpoints, latest))
    return Evidence(
        now=time.time(),
        ledger=ledgers.without_refused_jobs(run_dir.ledger.read()),
        metrics=summarize_metrics(run_dir.metrics),
        heartbeats=read_heartbeats(run_dir.heartbeats),
        locks=run_dir.locks(),
        checkpoint=latest,
        checkpoint_time=saved,
        steps=steps,
        is_beating=is_beating,
    )


def summarize_metrics(path: Path) -> MetricsSummary:
    """Sums over a file that may have a million lines: only the ends of intervals and the last lines
    are parsed."""
    seconds, speeds = 0.0, deque[float](maxlen=RECENT_INTERVALS)
    trained: deque[bytes] = deque(maxlen=_LAST_LINES)
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            if b'"kind": "train"' not in line:
                continue
            trained.append(line)
            if b'"tokens_per_second"' in line and (interval := measurement_of(line)):
                seconds += interval.get("seconds", 0.0)
                speeds.append(interval["tokens_per_second"])
    latest_first = [found for line in reversed(trained) if (found := measurement_of(line))]
    return MetricsSummary(
        step=latest_first[0]["step"] if latest_first else 0,
        loss=next((line["loss"] for line in latest_first if line["loss"] is not None), None),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds,
    )


def _time_saved(checkpoint: Path) -> float | None:
    try:
        return (checkpoint / MARKER).stat().st_mtime
    except FileNotFoundError:  # it is being deleted
        return None
