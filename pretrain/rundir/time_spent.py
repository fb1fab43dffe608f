"""What a run's time went into, and goodput: the part that went into training. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
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
    evaluation: float
    saving: float  # waiting for saves; most of a save is written while training continues
    stalls: float  # steps that took far longer than usual
    restarts: float  # all else: starts and stops, waiting after failures, steps made again, and
    # what is not measured yet, such as an evaluation in progress

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


def time_spent(metrics: MetricsSummary, ledger: Sequence[Event], end: float) -> TimeSpent | None:
    """Return what the time until `end` went into; None before a first interval of steps."""
    elapsed = elapsed_seconds(ledger, end)
    if elapsed <= 0 or not metrics.seconds:
        return None
    known = metrics.seconds + metrics.evaluation_seconds
    known += metrics.save_seconds + metrics.stall_seconds
    return TimeSpent(
        training=metrics.seconds - metrics.data_seconds,
        waiting_for_data=metrics.data_seconds,
        evaluation=metrics.evaluation_seconds,
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
            since = event.time
        elif since is not None and (
            is_finished(event) or is_stopped(event) or isinstance(event, JobEnded)
        ):
            elapsed, since = elapsed + event.time - since, None
    return elapsed if since is None else elapsed + end - since
