"""A fit against runs it did not see: those held out, and those of the largest budget. Legend: P points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.estimates import estimate
from pretrain.scaling.isoflop import FEWEST_SIZES, fit_isoflop
from pretrain.scaling.law import FlopsLaw, log_loss
from pretrain.scaling.lines import Interval, LawLine, interval
from pretrain.scaling.points import Array, Points

Number = TypeVar("Number", float, Array)


def relative_error(predicted: Number, measured: Number) -> Number:
    """Predicted minus measured, as a part of the measured: positive where too much was predicted. So everywhere."""
    return predicted / measured - 1


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A run's measured loss against what the law says of its N and D; the interval is the law's, without run noise."""

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


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What the runs below the largest budget would have predicted for it."""

    budget: float
    law_error: (
        float | None
    )  # mean |relative error| of approach 3 over that budget's runs; None without approach 3
    optimum: dict[str, tuple[float, float]]  # approach -> (predicted N*, predicted loss there)
    unavailable: dict[str, str]  # approach -> why those runs do not allow it
    measured: (
        tuple[float, float] | None
    )  # N*, loss: the budget's vertex, else its lowest run; None below 3 sizes


def leave_largest_out(points: Points, flops_law: FlopsLaw) -> LeftOut | None:
    """Fit without the largest budget and predict it; None when fewer than two budgets would be left."""
    budgets = points.budgets
    if len(budgets) < 3:
        return None
    rest, last = (
        points.take(points.budget_P < budgets[-1]),
        points.take(points.budget_P == budgets[-1]),
    )
    estimates = estimate(rest)
    log_flops = float(np.log(last.flops_P).mean())
    optimum = {
        key: (float(np.exp(line.log_parameters(log_flops))), float(line.loss(log_flops)))
        for key, line in estimates.lines(flops_law).items()
    }
    law_error = None
    if estimates.parametric:
        predicted_P = estimates.parametric.law.loss(last.parameters_P, last.tokens_P)
        law_error = float(np.abs(relative_error(predicted_P, last.loss_P)).mean())
    return LeftOut(
        budget=float(budgets[-1]),
        law_error=law_error,
        optimum=optimum,
        unavailable=estimates.unavailable,
        measured=_measured_optimum(points, last),
    )


def seed_spread(points: Points) -> float | None:
    """The relative standard deviation of losses that differ only by their seed; None where no run was repeated."""
    groups: dict[tuple[float, float], list[float]] = {}
    for size, tokens, loss in zip(points.parameters_P, points.tokens_P, points.loss_P, strict=True):
        groups.setdefault((float(size), float(tokens)), []).append(float(np.log(loss)))
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return None
    squares = sum(np.var(group) * len(group) for group in repeated)
    return float(np.sqrt(squares / sum(len(group) - 1 for group in repeated)))


def _measured_optimum(points: Points, last: Points) -> tuple[float, float] | None:
    if len(np.unique(last.parameters_P)) < FEWEST_SIZES:
        return None
    try:
        valley = fit_isoflop(points).valleys[-1]
        if valley.is_used:
            return valley.parameters, valley.loss
    except DataError:
        pass  # no parabolas at all: the lowest run stands for the valley
    lowest = int(last.loss_P.argmin())
    return float(last.parameters_P[lowest]), float(last.loss_P[lowest])


def predict_holdouts(runs: Points, law: LawLine, draws: LawLine) -> tuple[Prediction, ...]:
    """What the law says of the runs that were held out, beside what was measured."""
    held = runs.take(runs.holdout_P)
    found = []
    columns = (held.names, held.parameters_P, held.tokens_P, held.flops_P, held.loss_P)
    for name, size, tokens, flops, loss in zip(*columns, strict=True):
        predicted = loss_interval(law, draws, float(size), float(tokens))
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


def loss_interval(law: LawLine, draws: LawLine, parameters: float, tokens: float) -> Interval:
    """L(N, D) and the interval of the draws."""
    value, draws_K = (
        np.exp(log_loss(line.theta, np.log([parameters]), np.log([tokens]))[..., 0])
        for line in (law, draws)
    )
    return interval(value, draws_K)
