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
from pretrain.rundir import goodput as time_spent
from pretrain.rundir.goodput import time_of
from pretrain.rundir.run_dir import RunDir

FAILURES = ("attempt_ended", "out_of_memory", "gave_up")
SMOOTHED_PARTS = 60  # a smooth curve averages over this part of the run


@dataclass(frozen=True)
class History:
    """A run's measurements and events, oldest first; X marks the steps of a series."""

    path: Path
    config: RunConfig
    train: Sequence[Mapping[str, Any]]  # a line per step
    evaluations: Sequence[Mapping[str, Any]]
    ledger: Sequence[Mapping[str, Any]]
    last_sign: float  # when the measurements were last written, seconds since 1970

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

    def events(self, *kinds: str) -> list[Mapping[str, Any]]:
        """The ledger's events of these kinds."""
        return [event for event in self.ledger if event.get("event") in kinds]

    @property
    def failures(self) -> list[Mapping[str, Any]]:
        """Attempts that ended badly, where a launcher or the run itself could still write it down."""
        return [
            event
            for event in self.events(*FAILURES)
            if event.get("next") not in ("finished", "stopped")
        ]

    @property
    def seconds_under_way(self) -> float:
        """Time from the first start on in which the run was not finished, stopped or queued."""
        return time_spent.elapsed_seconds(
            self.ledger, max(self.last_sign, time_of(self.ledger[-1]))
        )

    @property
    def seconds_that_count(self) -> float:
        """In steps that were not made again."""
        return sum(line.get("seconds", 0.0) for line in self.train)

    @property
    def goodput(self) -> float | None:
        """The share of the time under way that went into steps that count."""
        return time_spent.goodput(self.seconds_that_count, self.seconds_under_way)

    @property
    def progress(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds since the first start, and the step the run stood at then; it falls where the run went back."""
        points = [(time_of(event), event["step"]) for event in self.ledger if "step" in event]
        points += [(time_of(event) + 0.001, event["to_step"]) for event in self.events("rewind")]
        points += [(line["time"], line["step"]) for line in self.train if "time" in line]
        seconds_X, steps_X = np.array(sorted(points), float).reshape(-1, 2).T
        return seconds_X - self._first_second, steps_X

    @property
    def setbacks(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds since the first start, and the newest saved or reached step, where an attempt failed or went back."""
        points = [
            (time_of(event), event.get("step", 0))
            for event in [*self.failures, *self.events("rewind")]
        ]
        seconds_X, steps_X = np.array(sorted(points), float).reshape(-1, 2).T
        return seconds_X - self._first_second, steps_X

    @property
    def _first_second(self) -> float:
        return min(time_of(event) for event in self.ledger if "step" in event)


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
        ledger=run_dir.read_ledger(),
        last_sign=run_dir.metrics.stat().st_mtime,
    )
