"""All approaches fitted to the same runs, with and without the largest budget. Legend: P points.

An approach that these runs do not allow is recorded with its reason and raises no error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.checks import relative_error
from pretrain.scaling.envelope import EnvelopeFit, fit_envelope
from pretrain.scaling.frontier import LawLine, Line
from pretrain.scaling.huber_fit import ParametricFit, fit_parametric
from pretrain.scaling.isoflop import FEWEST_SIZES, REACH, IsoflopFit, fit_isoflop
from pretrain.scaling.law import FlopsLaw
from pretrain.scaling.points import Array, Points

T = TypeVar("T")
TITLES = {"envelope": "1 envelope", "isoflop": "2 IsoFLOP", "parametric": "3 parametric"}


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The fits without intervals; `unavailable` has the reason for each that is missing."""

    envelope: EnvelopeFit | None
    isoflop: IsoflopFit | None
    parametric: ParametricFit | None
    unavailable: dict[str, str]

    def lines(self, flops_law: FlopsLaw) -> dict[str, Line]:
        """The compute-optimal line of each approach there is."""
        found: dict[str, Line] = {}
        if self.envelope:
            found["envelope"] = self.envelope.frontier
        if self.isoflop:
            found["isoflop"] = self.isoflop.frontier
        if self.parametric:
            found["parametric"] = LawLine(self.parametric.law.theta, flops_law)
        return found


def estimate(
    points: Points, training: Mapping[str, Array] | None = None, reach: float = REACH
) -> Estimates:
    """Fit all approaches; `training` has curves for approach 1, `reach` is approach 2's."""
    unavailable: dict[str, str] = {}

    def attempt(key: str, function: Callable[[], T]) -> T | None:
        try:
            return function()
        except DataError as error:
            unavailable[key] = str(error).removeprefix(f"{points.source}: ")
            return None

    return Estimates(
        envelope=attempt("envelope", lambda: fit_envelope(points, training)),
        isoflop=attempt("isoflop", lambda: fit_isoflop(points, reach)),
        parametric=attempt("parametric", lambda: fit_parametric(points)),
        unavailable=unavailable,
    )


Below = Callable[[float], Estimates]


def estimates_below(points: Points, reach: float) -> Below:
    """Return what fits the budgets below one; whoever asks for the same split shares its fit."""

    @cache
    def below(budget: float) -> Estimates:
        return estimate(points.take(points.budget_P < budget), reach=reach)

    return below


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """The prediction of the largest budget from the runs at smaller ones."""

    budget: float
    law_error: (
        float | None
    )  # mean |relative error| of approach 3 over that budget's runs; None without approach 3
    optimum: dict[str, tuple[float, float]]  # approach -> (predicted N*, predicted loss there)
    unavailable: dict[str, str]  # approach -> why those runs do not allow it
    measured: (
        tuple[float, float] | None
    )  # N*, loss: the budget's vertex, else its lowest run; None below 3 sizes


def leave_largest_out(
    points: Points, flops_law: FlopsLaw, isoflop: IsoflopFit | None, below: Below
) -> LeftOut | None:
    """Predict the largest budget from those below; None with fewer than three budgets.

    `isoflop` is the fit of all budgets.
    """
    budgets = points.budgets
    if len(budgets) < 3:
        return None
    last = points.take(points.budget_P == budgets[-1])
    estimates = below(float(budgets[-1]))
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
        measured=measured_optimum(isoflop, last),
    )


def measured_optimum(isoflop: IsoflopFit | None, last: Points) -> tuple[float, float] | None:
    """N* and its loss at the one budget of `last`: its vertex in the fit, else its lowest run.

    None below 3 sizes.
    """
    if len(np.unique(last.parameters_P)) < FEWEST_SIZES:
        return None
    for valley in isoflop.valleys if isoflop else ():
        if valley.budget == last.budget_P[0] and valley.is_used:
            return valley.parameters, valley.loss
    lowest = int(last.loss_P.argmin())
    return float(last.parameters_P[lowest]), float(last.loss_P[lowest])
