"""Two ways of doing the same work, timed in turns in one process, and what their ratio is held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from pretrain.terminal.text import markdown_table

TOLERANCE = 0.85  # a ratio may be this part of its goal before the bench fails: machines and neighbours differ


@dataclass(frozen=True)
class Comparison:
    """`candidate` is to be `goal` times as fast as `baseline`; each call does the whole work once."""

    name: str
    goal: float
    baseline: Callable[[], object]
    candidate: Callable[[], object]
    rounds: int
    flops: float = 0.0  # that the candidate's matrix products need; 0: not counted
    candidate_work: float = 1.0  # how many times the baseline's work one call of the candidate does
    own_clock: bool = False  # both return the seconds that count, of work that has other parts too


@dataclass(frozen=True)
class Measurement:
    """Seconds of each round of one comparison, in the order they were measured."""

    name: str
    goal: float
    baseline_seconds: list[float]
    candidate_seconds: list[float]
    flops: float
    candidate_work: float = 1.0

    @property
    def ratios(self) -> list[float]:
        """How many times as fast the candidate was, round by round."""
        return [
            self.candidate_work * a / b
            for a, b in zip(self.baseline_seconds, self.candidate_seconds, strict=True)
        ]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def passes(self) -> bool:
        return self.ratio >= TOLERANCE * self.goal


def measure(comparison: Comparison, clock: Callable[[], float] = time.perf_counter) -> Measurement:
    """Time both sides in every round, one after the other, after one round that does not count.

    The side that goes first changes from round to round, so that neither always meets the other's warm or dirty cache.
    """
    seconds: dict[str, list[float]] = {"baseline": [], "candidate": []}
    sides = [("baseline", comparison.baseline), ("candidate", comparison.candidate)]
    for index in range(comparison.rounds + 1):
        for name, work in sides if index % 2 == 0 else sides[::-1]:
            begin = clock()
            result = work()
            taken = float(result) if comparison.own_clock else clock() - begin  # type: ignore[arg-type]
            if index > 0:
                seconds[name].append(taken)
    return Measurement(
        comparison.name,
        comparison.goal,
        seconds["baseline"],
        seconds["candidate"],
        comparison.flops,
        comparison.candidate_work,
    )


def table(measurements: list[Measurement], flops_per_second: float) -> str:
    """Measurements as a Markdown table; the floor is the time the matrix products alone would take."""
    rows = [
        [
            "comparison",
            "goal",
            "median",
            "min",
            "max",
            "reference ms",
            "ours ms",
            "floor ms",
            "verdict",
        ]
    ]
    for each in measurements:
        rows.append(
            [
                each.name,
                f"{each.goal:.1f}x",
                f"{each.ratio:.2f}x",
                f"{min(each.ratios):.2f}x",
                f"{max(each.ratios):.2f}x",
                f"{1e3 * statistics.median(each.baseline_seconds):,.1f}",
                f"{1e3 * statistics.median(each.candidate_seconds):,.1f}",
                f"{1e3 * each.flops / flops_per_second:,.1f}" if each.flops else "-",
                _verdict(each),
            ]
        )
    return markdown_table(rows)


def _verdict(measurement: Measurement) -> str:
    if measurement.ratio >= measurement.goal:
        return "reached"
    return "close" if measurement.passes else "MISSED"
