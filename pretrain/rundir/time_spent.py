"""What a run's time went into, and goodput: the part that went into training. Torch-free.

When the launcher started a rank, which the rank's first event comes seconds after.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from pretrain.rundir.events import Event, JobEnded, JobStarted, TrainingBegan
from pretrain.rundir.ledger import is_finished, is_stopped
from pretrain.rundir.metrics_file import MetricsSummary


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """Seconds since the first start in which the run was neither finished, stopped nor in Slurm's
    queue, by what they went into."""

    training: float  # steps that count, without what follows
    waiting_for_data: float
    evaluation: float  # also one in progress
    saving: float  # waiting for saves; most of a save is written while training continues
    stalls: float  # steps that took far longer than usual
    restarts: float  # all else: starts and stops, waiting after failures, steps made again

    @property
    def total(self) -> float:
        return sum(astuple(self))

    @property
    def goodput(self) -> float:
        """The part that went into training."""
        return self.training / self.total

    @property
    def description(self) -> str:
        """The parts that took any time, largest first."""
        parts = {name.replace("_", " "): value for name, value in vars(self).items()}
        shown = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(
            f"{name} {value / self.total:.1%}" for name, value in shown if value / self.total > 5e-4
        )


def time_spent(
    metrics: MetricsSummary, ledger: Sequence[Event], end: float, evaluating: float = 0.0
) -> TimeSpent | None:
    """Return what the time until `end` went into; None before a first interval of steps.

    For so many seconds the run has been `evaluating` since its last measurement.
    """
    elapsed = elapsed_seconds(ledger, end)
    if elapsed <= 0 or not metrics.seconds:
        return None
    evaluation = metrics.evaluation_seconds + evaluating
    known = metrics.seconds + evaluation + metrics.save_seconds + metrics.stall_seconds
    return TimeSpent(
        training=metrics.seconds - metrics.data_seconds,
        waiting_for_data=metrics.data_seconds,
        evaluation=evaluation,
        saving=metrics.save_seconds,
        stalls=metrics.stall_seconds,
        restarts=max(0.0, elapsed - known),
    )


def elapsed_seconds(ledger: Sequence[Event], end: float) -> float:
    """Return the seconds from the first start of ranks to `end` in which the run was neither
    finished, stopped nor in Slurm's queue."""
    elapsed, since, has_begun = 0.0, None, False
    for event in ledger:
        has_begun = has_begun or isinstance(event, TrainingBegan)
        if since is None and has_begun and isinstance(event, (TrainingBegan, JobStarted)):
            # The time before a rank's first event, most of it imports, is a start, too.
            since = event.time - getattr(event, "start_seconds", 0.0)
        elif since is not None and (
            is_finished(event) or is_stopped(event) or isinstance(event, JobEnded)
        ):
            elapsed, since = elapsed + event.time - since, None
    return elapsed if since is None else elapsed + end - since


STARTED_AT = "PRETRAIN_STARTED_AT"  # seconds since 1970, in the environment of a rank


def seconds_since_start(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds since the launcher started this rank; 0 without a launcher."""
    try:
        return max(0.0, time.time() - float(environment.get(STARTED_AT, "inf")))
    except ValueError:
        return 0.0
