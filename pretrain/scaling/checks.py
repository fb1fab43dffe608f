"""Checks of a fit: held-out runs, and whether the approaches agree. Legend: P points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np

from pretrain.scaling.frontier import Approach, law_of
from pretrain.scaling.intervals import Interval, as_loss, shown
from pretrain.scaling.law import loss_at
from pretrain.scaling.points import Array, Points

Number = TypeVar("Number", float, Array)


def relative_error(predicted: Number, measured: Number) -> Number:
    """(predicted - measured) / measured: positive if the prediction is too high, everywhere."""
    return predicted / measured - 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A run's loss as measured and as predicted by the law; the interval excludes run noise."""

    name: str
    parameters: float
    tokens: float
    flops: float
    measured: float
    predicted: Interval

    @property
    def error(self) -> float:
        """See `relative_error`."""
        return relative_error(self.predicted.value, self.measured)


def predict_holdouts(runs: Points, law: Approach) -> tuple[Prediction, ...]:
    """The law's predictions of the runs that were held out, with their measured losses."""
    held = runs.take(runs.holdout_P)
    found = []
    columns = (held.names, held.parameters_P, held.tokens_P, held.flops_P, held.loss_P)
    for name, size, tokens, flops, loss in zip(*columns, strict=True):
        predicted = loss_interval(law, float(size), float(tokens))
        found.append(
            Prediction(
                name=name,
                parameters=float(size),
                tokens=float(tokens),
                flops=float(flops),
                measured=float(loss),
                predicted=predicted,
            )
        )
    return tuple(found)


def loss_interval(law: Approach, parameters: float, tokens: float) -> Interval:
    """L(N, D) by approach 3, with its interval."""
    n, d = np.log(parameters), np.log(tokens)
    return law.interval(lambda line: loss_at(law_of(line).theta, n, d))


DISAGREEMENT = 1.5  # ratio of the approaches' N* from which there is a warning
BEYOND = 10.0  # agreement is also measured at this multiple of the largest budget
SEEN = 1e-4  # of the loss: intervals whose ends are closer than this count as overlapping


def disagreement(approaches: Sequence[Approach], log_flops: float) -> float:
    """The largest N* over the smallest that the approaches name at C FLOPs."""
    sizes = np.array([float(approach.line.log_parameters(log_flops)) for approach in approaches])
    finite = sizes[np.isfinite(sizes)]
    return float(np.exp(np.ptp(finite))) if len(finite) else np.nan


def beyond(largest: float) -> tuple[float, str]:
    """FLOPs beyond the largest budget at which approaches are compared, and a label for them."""
    return BEYOND * largest, f"{BEYOND * largest:.3g} FLOPs, {BEYOND:.0f} times the largest budget"


def warnings_of(approaches: Sequence[Approach], largest: float) -> list[str]:
    """Where the approaches contradict each other, at the largest budget and beyond it."""
    found: list[str] = []
    for flops, where in ((largest, f"{largest:.3g} FLOPs, the largest budget"), beyond(largest)):
        log_flops = float(np.log(flops))
        ratio = disagreement(approaches, log_flops)
        if ratio > DISAGREEMENT:
            found.append(f"at {where}, the approaches' optimal sizes differ {ratio:.2f}x")
        found += contradictions(
            {each.title: each.loss(log_flops) for each in approaches}, f"at {where}"
        )
    return found


def contradictions(losses: Mapping[str, Interval], where: str) -> list[str]:
    """One line if two approaches' intervals of the loss do not overlap, else none."""
    texts = {title: shown(interval, as_loss) for title, interval in losses.items()}
    pairs = [
        f"{first} {texts[first]} and {second} {texts[second]}"
        for first, second in combinations(losses, 2)
        if _are_apart(losses[first], losses[second])
    ]
    if not pairs:
        return []
    return [
        f"{where}, the intervals of the loss do not overlap: {'; '.join(pairs)}; an interval "
        "covers the scatter of "
        "the runs, not an approach's own bias; do not rely on a single approach"
    ]


def _are_apart(first: Interval, second: Interval) -> bool:
    gap = max(first.low, second.low) - min(first.high, second.high)
    return bool(gap > SEEN * max(first.value, second.value))  # False where an end is NaN
