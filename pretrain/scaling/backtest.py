"""Laws judged by the largest budgets: fitted without them, they predict their runs.

The ranking of laws leaves out the top tenth of the runs. A backtest goes as far as a question does:
it leaves out all budgets above a fraction of the largest, and predicts that one. On the sweeps that
others have published such errors are far above the noise of single runs (docs/scaling.md).

Legend: P points.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from foundation.errors import DataError
from pretrain.scaling.frontier import (
    Fitted,
    FrontierFit,
    Valley,
    fit_isoflop,
    fit_lowest_runs,
)
from pretrain.scaling.law import FEWEST_GROUPS, fit_flops_law, fit_parametric
from pretrain.scaling.table import Points

NEAR = 3.0  # times N*, either way: the lowest run's neighbors, which decide what N* is
FEWEST_CHECKED = 5  # runs that laws are ranked by, where fewer would leave it to chance
CHECKED = 0.1  # of the runs
TIMES = (4.0, 10.0)  # that a backtest's largest budget lies beyond those fitted


def estimate(points: Points) -> tuple[dict[str, Fitted], dict[str, str]]:
    """Return every law fitted, and the reason for each that these runs do not allow."""
    fits: dict[str, Callable[[], Fitted]] = {
        "parametric": lambda: fit_parametric(points),
        "tied": lambda: fit_parametric(points, tied=True),
        "isoflop": lambda: fit_isoflop(points),
        "lowest": lambda: fit_lowest_runs(points),
    }
    laws, unavailable = {}, {}
    for key, fit in fits.items():
        try:
            laws[key] = fit()
        except DataError as error:
            unavailable[key] = str(error).removeprefix(f"{points.source}: ")
    return laws, unavailable


def left_out_errors(points: Points, laws: Mapping[str, Fitted]) -> dict[str, tuple[float, int]]:
    """Return each law's mean |relative error| of the losses of the largest budgets, fitted without
    them, and the number of runs that it is a mean of; nothing with fewer than three budgets.

    `laws` are fitted to all budgets. Only runs near N* count that all laws predict, and for
    approach 1, which predicts no others, the lowest run of each budget.
    """
    budgets = points.budgets
    if len(budgets) < 3:
        return {}
    wanted = max(FEWEST_CHECKED, CHECKED * len(points))
    counts = [int((points.budget_P >= budget).sum()) for budget in budgets[2:]]
    first = 2 + max((i for i, count in enumerate(counts) if count >= wanted), default=0)
    is_checked_P = points.budget_P >= budgets[first]
    top, (below, _) = points.take(is_checked_P), estimate(points.take(~is_checked_P))
    predicted = {key: law.losses(top) for key, law in below.items() if key != "lowest"}
    best_P = np.array(_best_sizes(top, laws))[np.searchsorted(top.budgets, top.budget_P)]
    off_P = np.abs(np.log(top.parameters_P / best_P))
    is_known_P = np.all([np.isfinite(loss_P) for loss_P in predicted.values()] or [True], axis=0)
    near_P = is_known_P & (off_P <= np.log(NEAR))
    if not near_P.any():
        near_P[top.loss_P.argmin()] = True
    errors = {
        key: (float(np.abs(loss_P / top.loss_P - 1)[near_P].mean()), int(near_P.sum()))
        for key, loss_P in predicted.items()
    }
    if isinstance(lowest := below.get("lowest"), FrontierFit):
        best_F = np.array([top.loss_P[top.budget_P == budget].min() for budget in top.budgets])
        line_F = lowest.frontier.loss(np.log(top.budgets))
        errors["lowest"] = float(np.abs(line_F / best_F - 1).mean()), len(best_F)
    return {key: (error, count) for key, (error, count) in errors.items() if math.isfinite(error)}


def _best_sizes(top: Points, laws: Mapping[str, Fitted]) -> list[float]:
    """Return the vertex of each budget's valley, or the size of its lowest run."""
    vertices = {valley.budget: valley.parameters for valley in _used_valleys(laws)}
    sizes = []
    for budget in top.budgets.tolist():
        mine = top.take(top.budget_P == budget)
        sizes.append(vertices.get(budget, float(mine.parameters_P[mine.loss_P.argmin()])))
    return sizes


def _used_valleys(laws: Mapping[str, Fitted]) -> list[Valley]:
    isoflop = laws.get("isoflop")
    return isoflop.used if isinstance(isoflop, FrontierFit) else []


@dataclass(frozen=True)
class Backtest:
    """How far a law was off at the largest budget, fitted to budgets up to a fraction of it."""

    times: float  # the largest budget over the largest of those fitted
    size: float  # predicted N* over the vertex of the budget's valley; NaN where it has none
    loss: float  # (predicted - measured) / measured, at the optimum or of the budget's runs


def backtests(points: Points, laws: Mapping[str, Fitted]) -> dict[str, list[Backtest]]:
    """Return the backtests of each law at TIMES, as far as four budgets remain to be fitted."""
    tests: dict[str, list[Backtest]] = {}
    top = float(points.budgets[-1])
    last = points.take(points.budget_P == top)
    valley = next((item for item in _used_valleys(laws) if item.budget == top), None)
    for cut in sorted({_largest_below(points, top / times) for times in TIMES} - {0.0})[::-1]:
        below = points.take(points.budget_P <= cut)
        if len(below.budgets) < FEWEST_GROUPS:
            continue
        flops_law = fit_flops_law(below.parameters_P, below.tokens_P, below.flops_P)
        for key, law in estimate(below)[0].items():
            line, size = law.line(flops_law), math.nan
            if valley:
                size = float(np.exp(line.log_parameters(np.log(top)))) / valley.parameters
                loss = float(line.loss(np.log(top))) / valley.loss - 1
            else:
                loss = float(np.mean(law.losses(last) / last.loss_P)) - 1
            if math.isfinite(loss):
                tests.setdefault(key, []).append(Backtest(top / cut, size, loss))
    return tests


def _largest_below(points: Points, flops: float) -> float:
    """Return the largest budget of at most so many FLOPs; 0 for none."""
    return float(max(points.budgets[points.budgets <= 1.01 * flops], default=0.0))
