"""What a run's directory tells of its past, ready to be drawn. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from pretrain.config.run import RunConfig
from pretrain.rundir import ledger as ledgers
from pretrain.rundir.ledger import Interruption, events_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Event, Rewind

SMOOTHED_PARTS = 60  # a smooth curve averages over this part of the run


@dataclass(frozen=True)
class History:
    """A run's measurements and events, oldest first; X marks the steps of a series."""

    path: Path
    config: RunConfig
    train: Sequence[Mapping[str, Any]]  # a line per step
    evaluations: Sequence[Mapping[str, Any]]
    ledger: Sequence[Event]
    last_sign: float  # when the measurements were last written, seconds since 1970
    is_running: bool = False

    @property
    def name(self) -> str:
        """The run's name and its directory's, where that says more."""
        return (
            self.config.name
            if self.path.name in (self.config.name, "")
            else f"{self.config.name} ({self.path.name})"
        )

    def series(
        self, name: str, lines: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a measurement, where there is one."""
        found = [
            (line["step"], line[name])
            for line in (self.train if lines is None else lines)
            if line.get(name) is not None
        ]
        steps_X, values_X = np.array(found, float).reshape(-1, 2).T
        return steps_X, values_X

    def layers(self, kind: str) -> list[str]:
        """The layers that a kind of norm was measured of, such as `layer.0`."""
        measured = next(
            (line for line in self.train if any(key.startswith(f"{kind}/") for key in line)), {}
        )
        return [key.removeprefix(f"{kind}/") for key in measured if key.startswith(f"{kind}/")]

    @cached_property
    def smooth_loss(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and the mean loss of the steps around them."""
        steps_X, losses_X = self.series("loss")
        width = max(1, len(losses_X) // SMOOTHED_PARTS)
        sums_X = np.concatenate([[0.0], np.cumsum(losses_X)])
        begins_X = np.maximum(np.arange(len(losses_X)) - width, 0)
        ends_X = np.minimum(np.arange(len(losses_X)) + width + 1, len(losses_X))
        return steps_X, (sums_X[ends_X] - sums_X[begins_X]) / (ends_X - begins_X)

    @property
    def step(self) -> int:
        return self.train[-1]["step"]

    @property
    def tokens(self) -> int:
        return self.train[-1]["tokens"]

    @property
    def loss(self) -> float:
        """The mean training loss around the end."""
        return float(self.smooth_loss[1][-1])

    @property
    def tokens_per_second(self) -> float | None:
        speeds = [line["tokens_per_second"] for line in self.train if "tokens_per_second" in line]
        return statistics.median(speeds) if speeds else None

    @property
    def num_skipped(self) -> int:
        return sum(bool(line["skipped"]) for line in self.train)

    @property
    def failures(self) -> list[Interruption]:
        """Attempts that failed, also those that were killed together with their supervisor."""
        return [
            each for each in ledgers.interruptions(self.ledger, self.is_running) if each.is_failure
        ]

    @property
    def rewinds(self) -> list[Rewind]:
        return events_of(self.ledger, Rewind)

    @property
    def seconds_under_way(self) -> float:
        """Time from the first start on in which the run was not finished, stopped or queued."""
        return ledgers.elapsed_seconds(self.ledger, max(self.last_sign, self.ledger[-1].time))

    @property
    def seconds_that_count(self) -> float:
        """In steps that were not made again."""
        return sum(line.get("seconds", 0.0) for line in self.train)

    @property
    def goodput(self) -> float | None:
        """The share of the time under way that went into steps that count."""
        return ledgers.goodput(self.seconds_that_count, self.seconds_under_way)

    @property
    def progress(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds since the first start, and the run's step at each; it falls at a rewind."""
        points = [(event.time, step) for event, step in self._steps_of_events]
        points += [(event.time + 0.001, event.to_step) for event in self.rewinds]
        points += [(line["time"], line["step"]) for line in self.train if "time" in line]
        seconds_X, steps_X = np.array(sorted(points), float).reshape(-1, 2).T
        return seconds_X - self._first_second, steps_X

    @property
    def setbacks(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds since the first start, and the step, of every failed attempt and rewind."""
        points = [(event.time, event.step) for event in [*self.failures, *self.rewinds]]
        seconds_X, steps_X = np.array(sorted(points), float).reshape(-1, 2).T
        return seconds_X - self._first_second, steps_X

    @property
    def _first_second(self) -> float:
        return min(event.time for event, _ in self._steps_of_events)

    @property
    def _steps_of_events(self) -> list[tuple[Event, int]]:
        """The events that name a step."""
        steps = ((event, getattr(event, "step", None)) for event in self.ledger)
        return [(event, step) for event, step in steps if step is not None]


def read_history(path: Path) -> History:
    """The past of the run in this directory; DataError if it has made no step yet."""
    run_dir = RunDir.open(path)
    measured = run_dir.read_metrics()
    train = [line for line in measured if line.get("kind") == "train"]
    if not train or all(line.get("loss") is None for line in train):
        raise DataError(f"{path} has no measured step yet; train it first")
    return History(
        path=path,
        config=run_dir.config,
        train=train,
        evaluations=[line for line in measured if line.get("kind") == "evaluation"],
        ledger=ledgers.without_refused_jobs(run_dir.ledger.read()),
        last_sign=run_dir.metrics.stat().st_mtime,
        # a lock of another host cannot be looked up: its run counts as running
        is_running=any(lock.is_held is not False for lock in run_dir.locks()),
    )
