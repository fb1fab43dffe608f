"""Finished runs as the points of a fit. A run is left out only with a reason.

Legend: P points. N parameters, D training tokens, C training FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

SAME_BUDGET = 1.1  # without a budget column, runs whose FLOPs lie within this factor share a budget
FINISHED = 0.999  # a run counts as finished from this fraction of its schedule on

HELD_OUT = "held out: predicted, not fitted"  # why a run is not among those fitted

Array = np.ndarray


@dataclass(frozen=True)
class Exclusion:
    """A run that takes no part in a fit, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Points:
    """Runs as columns of equal length P, with those left out and notes for the reader."""

    names: tuple[str, ...]
    parameters_P: Array
    tokens_P: Array
    flops_P: Array
    loss_P: Array
    budget_P: Array
    progress_P: Array
    holdout_P: Array
    excluded: tuple[Exclusion, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bits_per_nat: float = np.nan  # bits per byte of a loss of 1 nat per token; NaN: unknown
    source: str = "points"

    def __len__(self) -> int:
        return len(self.names)

    def take(self, chosen_P: Array) -> Points:
        """The points of a mask or of indices."""
        indices = np.flatnonzero(chosen_P) if chosen_P.dtype == bool else chosen_P
        arrays = {name: getattr(self, name)[indices] for name in _ARRAYS}
        return replace(self, names=tuple(self.names[i] for i in indices), **arrays)

    def without(self, bad_P: Array, reason_of: Callable[[int], str]) -> Points:
        """The points outside the mask; those inside are excluded with their reasons."""
        left_out = tuple(Exclusion(self.names[i], reason_of(int(i))) for i in np.flatnonzero(bad_P))
        return replace(self.take(~bad_P), excluded=self.excluded + left_out)

    @property
    def budgets(self) -> Array:
        """The distinct budgets, ascending."""
        return np.unique(self.budget_P)


_ARRAYS = (
    "parameters_P",
    "tokens_P",
    "flops_P",
    "loss_P",
    "budget_P",
    "progress_P",
    "holdout_P",
)


def grouped_budgets(flops_P: Array) -> Array:
    """Each run's budget: the geometric mean of a group that spans at most SAME_BUDGET."""
    order = np.argsort(flops_P, kind="stable")
    # A group starts at its smallest run, so that a chain of close runs does not merge budgets.
    groups: list[list[int]] = []
    for index in order:
        if groups and flops_P[index] <= SAME_BUDGET * flops_P[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    budget_P = np.empty_like(flops_P)
    for group in groups:
        equal = (
            np.ptp(flops_P[group]) == 0
        )  # then exactly that, not the rounded exponential of its logarithm
        budget_P[group] = flops_P[group[0]] if equal else np.exp(np.mean(np.log(flops_P[group])))
    return budget_P


def usable(points: Points) -> Points:
    """The points to fit: finished and not held out. The others are excluded with a reason."""
    points = points.without(points.holdout_P, lambda _: HELD_OUT)
    return points.without(
        points.progress_P < FINISHED,
        lambda i: (
            f"mid-schedule: {points.progress_P[i]:.0%} of its schedule done, learning rate not "
            "yet decayed"
        ),
    )


def without_repeats(points: Points) -> Points:
    """Exclude later copies of a run, which would otherwise count double."""
    seen: dict[tuple[float, ...], str] = {}
    repeats_P = np.zeros(len(points), bool)
    for index in range(len(points)):
        key = (
            points.parameters_P[index],
            points.tokens_P[index],
            points.loss_P[index],
            points.progress_P[index],
        )
        repeats_P[index] = key in seen
        seen.setdefault(key, points.names[index])
    return points.without(repeats_P, lambda _: "repeats an earlier row with the same N, D and loss")
