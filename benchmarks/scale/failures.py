"""A run whose nodes fail, simulated event by event.

`pretrain/costs/run_time.py` has the closed form for failures at a constant rate. The simulation
takes any times between failures, a limited number of spare nodes, and a run that ends.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from pretrain.costs.run_time import FailureCosts


class Phase(Enum):
    """What a run does."""

    TRAINING = auto()
    PAUSED = auto()  # for a save
    DOWN = auto()  # detection, requeueing
    WAITING = auto()  # for a node
    STARTING = auto()


class _Event(Enum):
    FAILURE = auto()
    REPAIRED = auto()
    RESTARTABLE = auto()
    STARTED = auto()
    SAVE_DUE = auto()
    COPIED = auto()
    PUBLISHED = auto()


_OF_CLUSTER = (_Event.FAILURE, _Event.REPAIRED)  # all other events end with their attempt


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the simulated seconds were spent."""

    training: float  # without what was trained again
    repeated: float
    saving: float
    down: float
    waiting: float  # for a node
    starting: float
    failures: int

    @property
    def goodput(self) -> float:
        parts = (self.training, self.repeated, self.saving, self.down, self.waiting, self.starting)
        return self.training / sum(parts)


def simulate(
    costs: FailureCosts,
    interval: float,
    gaps: Iterator[float],
    seconds: float,
    spares: float = float("inf"),
    repair_seconds: float = 0.0,
) -> Outcome:
    """Return how a run spends its first `seconds`.

    `gaps` are the seconds between failures of any node. Each failure takes a node away for
    `repair_seconds`; `spares` stand by. `costs.between_failures` is not used.
    """
    return _Simulation(costs, interval, gaps, spares, repair_seconds).run(seconds)


def exponential(mean: float, seed: int) -> Iterator[float]:
    """Yield the seconds between failures that come at a constant rate."""
    draw = random.Random(seed)
    while True:
        yield draw.expovariate(1 / mean)


def weibull(mean: float, shape: float, seed: int) -> Iterator[float]:
    """Yield seconds between failures that come in clusters if `shape` is below 1.

    Large machines have a shape of 0.7 to 0.8 (Schroeder and Gibson, "A large-scale study of
    failures in high-performance-computing systems", DSN 2006).
    """
    draw, scale = random.Random(seed), mean / math.gamma(1 + 1 / shape)
    while True:
        yield draw.weibullvariate(scale, shape)


def uniform(least: float, most: float, seed: int) -> Iterator[float]:
    """Yield seconds between failures from `least` to `most`."""
    draw = random.Random(seed)
    while True:
        yield draw.uniform(least, most)


class _Simulation:
    def __init__(
        self,
        costs: FailureCosts,
        interval: float,
        gaps: Iterator[float],
        spares: float,
        repair_seconds: float,
    ) -> None:
        self._costs, self._interval, self._gaps = costs, interval, gaps
        self._free_nodes, self._repair_seconds = spares, repair_seconds
        self._now, self._attempt, self._failures = 0.0, 0, 0
        self._phase = Phase.STARTING
        self._spent = dict.fromkeys(Phase, 0.0)
        self._trained = self._copied = self._published = self._repeated = 0.0
        self._is_writing = self._is_save_due = False
        self._queue: list[tuple[float, int, _Event, int]] = []
        self._number = 0  # of events so far, so that those at the same time keep their order

    def run(self, seconds: float) -> Outcome:
        self._after(next(self._gaps), _Event.FAILURE)
        self._after(self._costs.start, _Event.STARTED)
        while self._queue[0][0] <= seconds:
            when, _, event, attempt = heapq.heappop(self._queue)
            if event in _OF_CLUSTER or attempt == self._attempt:
                self._pass_time(when)
                self._handle(event)
        self._pass_time(seconds)
        return Outcome(
            training=self._trained,
            repeated=self._repeated,
            saving=self._spent[Phase.PAUSED],
            down=self._spent[Phase.DOWN],
            waiting=self._spent[Phase.WAITING],
            starting=self._spent[Phase.STARTING],
            failures=self._failures,
        )

    def _after(self, seconds: float, event: _Event) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self._now + seconds, self._number, event, self._attempt))

    def _pass_time(self, until: float) -> None:
        self._spent[self._phase] += until - self._now
        if self._phase is Phase.TRAINING:
            self._trained += until - self._now
        self._now = until

    def _handle(self, event: _Event) -> None:
        match event:
            case _Event.FAILURE:
                self._fail()
            case _Event.REPAIRED:
                self._free_nodes += 1
                if self._phase is Phase.WAITING:
                    self._start_if_possible()
            case _Event.RESTARTABLE:
                self._start_if_possible()
            case _Event.STARTED:
                self._phase = Phase.TRAINING
                self._after(self._interval, _Event.SAVE_DUE)
            case _Event.SAVE_DUE:
                self._phase = Phase.PAUSED
                self._is_save_due = self._is_writing
                if not self._is_writing:
                    self._after(self._costs.pause, _Event.COPIED)
            case _Event.COPIED:
                self._phase, self._copied, self._is_writing = Phase.TRAINING, self._trained, True
                self._after(self._costs.write, _Event.PUBLISHED)
                self._after(self._interval, _Event.SAVE_DUE)
            case _Event.PUBLISHED:
                self._published, self._is_writing = self._copied, False
                if self._is_save_due:
                    self._is_save_due = False
                    self._after(self._costs.pause, _Event.COPIED)

    def _fail(self) -> None:
        self._failures += 1
        self._free_nodes -= 1
        self._after(next(self._gaps), _Event.FAILURE)
        self._after(self._repair_seconds, _Event.REPAIRED)
        if self._phase in (Phase.DOWN, Phase.WAITING):
            return  # nothing runs that could fail
        self._repeated += self._trained - self._published
        self._trained = self._published
        self._is_writing = self._is_save_due = False
        self._phase = Phase.DOWN
        self._attempt += 1
        self._after(self._costs.down, _Event.RESTARTABLE)

    def _start_if_possible(self) -> None:
        if self._free_nodes < 0:
            self._phase = Phase.WAITING
            return
        self._phase = Phase.STARTING
        self._after(self._costs.start, _Event.STARTED)
