"""What a run directory shows at one moment: ledger, metrics, heartbeats, locks, checkpoints. Reads.

Changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.directory import MARKER, step_directory
from pretrain.checkpoint.marker import latest_step
from pretrain.rundir.heartbeat_files import HeartbeatRecord, read_heartbeats
from pretrain.rundir.ledger import last_of
from pretrain.rundir.lock import Lock
from pretrain.rundir.metrics_summary import MetricsSummary, summarize_file
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.time_spent import TimeSpent, time_spent
from pretrain.rundir.training_events import Event, TrainingBegan


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
        """When the run last wrote anything: a killed run cannot write when it ended.

        By its own clock: the time of a checkpoint's file may be that of a file server.
        """
        times = [event.time for event in self.ledger[-1:]]
        times += [heartbeat.written for heartbeat in self.heartbeats]
        return max(times, default=self.checkpoint_time or 0.0)

    def time_spent(self, is_running: bool) -> TimeSpent | None:
        """What the run's time went into; None before the first step."""
        end = self.clock if is_running else self.last_seen
        return time_spent(self.metrics, self.ledger, end, self._seconds_evaluating(end))

    def _seconds_evaluating(self, end: float) -> float:
        """How long an evaluation is in progress, or was when the run was last seen."""
        latest = max(self.heartbeats, key=lambda each: each.time, default=None)
        if latest is None or latest.phase != "evaluate":
            return 0.0
        if (self.metrics.evaluation or {}).get("step") == latest.step:
            return 0.0  # it has just been written
        since, began = latest.time, last_of(self.ledger, TrainingBegan)
        if self.metrics.time is not None:
            # Each batch of an evaluation beats, so the heartbeat does not say when it began.
            since = min(since, max(self.metrics.time, began.time if began else 0.0))
        return max(0.0, end - since)

    @property
    def clock(self) -> float:
        """What the time is where the run is: its events have times of that clock, not of ours."""
        is_elsewhere = any(each.is_alive is None for each in self.heartbeats)
        return self.last_seen if is_elsewhere else self.now


def gather(run_dir: RunDir, steps: int, is_beating: bool = False) -> Evidence:
    """Read the directory of a run that has to make `steps` steps."""
    latest = latest_step(run_dir.checkpoints) or None
    saved = None if latest is None else _time_saved(step_directory(run_dir.checkpoints, latest))
    return Evidence(
        now=time.time(),
        ledger=run_dir.ledger.history(),
        metrics=summarize_file(run_dir.metrics),
        heartbeats=read_heartbeats(run_dir.heartbeats),
        locks=run_dir.locks(),
        checkpoint=latest,
        checkpoint_time=saved,
        steps=steps,
        is_beating=is_beating,
    )


def _time_saved(checkpoint: Path) -> float | None:
    try:
        return (checkpoint / MARKER).stat().st_mtime
    except FileNotFoundError:  # it is being deleted
        return None
