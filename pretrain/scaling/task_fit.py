"""From size and data to the accuracy of a task, in two steps, each checked on runs it did not see.

A task's loss follows L(N, D) (approach 3), and its accuracy a sigmoid of that loss. Accuracies
alone follow no power law: they are flat at chance for small models, and flat again at the top.
Source: Bhagia et al. 2024 (the OLMo ladder). Legend: F budgets, P runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from foundation.errors import DataError
from pretrain.scaling.fit import FEWEST_FREE, Fit, fit_all, law_of_runs, loss_interval
from pretrain.scaling.frontier import Approach, law_of
from pretrain.scaling.law import MOST_GROUPS, Interval, ParametricFit, jackknife
from pretrain.scaling.table import FINISHED, Array, Points
from pretrain.terminal.text import counted

FEWEST_RUNS = 6  # three numbers, and runs to contradict them
STEEPNESS = (1.0, 4.0, 16.0)  # of the sigmoid, times the width of the losses: where fits start
STARTS = (-1.0, 0.0, 0.5)  # of the sigmoid's middle: part of the width above the lowest loss
FARTHEST = 0.5  # of the width of the losses: a predicted loss farther below them is extrapolation


@dataclass(frozen=True)
class Sigmoid:
    """accuracy = floor + (ceiling - floor) / (1 + exp(steepness (loss - middle)))."""

    floor: float
    ceiling: float
    steepness: float
    middle: float

    def at(self, loss: float | Array) -> Array:
        """The accuracy at a loss."""
        rise = np.exp(np.clip(self.steepness * (np.asarray(loss) - self.middle), -500, 500))
        return self.floor + (self.ceiling - self.floor) / (1 + rise)


@dataclass(frozen=True, kw_only=True)
class TaskFit:
    """Both steps, with what their errors are."""

    fit: Fit  # of the task's loss
    sigmoid: Sigmoid
    law: Approach  # of the loss
    left_out: tuple[Sigmoid, ...]  # without each group of budgets that the law is fitted without
    loss_P: Array
    mean_error: float  # of the accuracy, by the sigmoid at the measured losses

    def predict(self, parameters: float, tokens: float) -> tuple[Interval, Interval]:
        """The loss and accuracy of a run; both steps are fitted without each group of budgets."""
        loss = loss_interval(self.law, parameters, tokens)
        value = float(self.sigmoid.at(loss.value))
        if not self.left_out:
            return loss, Interval(value, math.nan, math.nan)
        laws = (law_of(line).law for line in self.law.left_out)
        accuracy_G = [
            float(sigmoid.at(law.loss(parameters, tokens)))
            for law, sigmoid in zip(laws, self.left_out, strict=True)
        ]
        free = max(FEWEST_FREE, (len(accuracy_G) - 1) // 2)
        accuracy = jackknife(value, np.array(accuracy_G), free, is_linear=True)
        return loss, replace(accuracy, low=max(accuracy.low, 0.0), high=min(accuracy.high, 1.0))

    def backtest(self) -> tuple[float, float, float] | None:
        """Return the mean absolute errors on the largest budget, fitted without it; None without
        fits.

        They are of the loss (relative), of the accuracy by the second step alone, and by both.
        """
        points, group = self.fit.points, (len(self.fit.points.budgets) - 1) % MOST_GROUPS
        if not self.left_out or points.accuracy_P is None:
            return None
        last = points.take(points.budget_P == points.budgets[-1])
        law, sigmoid = law_of(self.law.left_out[group]).law, self.left_out[group]
        predicted_P = law.loss(last.parameters_P, last.tokens_P)
        accuracies_P = sigmoid.at(last.loss_P), sigmoid.at(predicted_P)
        loss = float(np.abs(predicted_P / last.loss_P - 1).mean())
        second, both = (
            float(np.abs(accuracy_P - last.accuracy_P).mean()) for accuracy_P in accuracies_P
        )
        return loss, second, both

    def extrapolated(self, loss: float) -> float:
        """How far below the measured losses a loss is, as a part of their width."""
        return float((self.loss_P.min() - loss) / np.ptp(self.loss_P))


def fit_task(runs: Points, chance: float | None = None, ceiling: float = 1.0) -> TaskFit:
    """Fit both steps; the points' losses are the task's. `chance` and `ceiling`: known ends.

    Mid-schedule rows with an accuracy are pairs of the second step.
    """
    fit = fit_all(runs)
    law, chosen = law_of_runs(fit), _pairs(runs)
    loss_P, accuracy_P = chosen.loss_P, chosen.accuracy_P
    assert accuracy_P is not None
    if len(law.left_out) > MOST_GROUPS:  # groups of runs: both steps have to miss the same budgets
        assert isinstance(law.fit, ParametricFit)
        lines = law.fit.left_out(fit.points, fit.flops_law, by_budget=True)
        law = replace(law, left_out=lines)
    sigmoid = fit_sigmoid(loss_P, accuracy_P, chance, ceiling)
    distance_PF = np.abs(np.log(chosen.budget_P)[:, None] - np.log(fit.points.budgets))
    group_P = distance_PF.argmin(axis=1) % MOST_GROUPS
    return TaskFit(
        fit=fit,
        sigmoid=sigmoid,
        law=law,
        left_out=tuple(
            _least_squares(
                loss_P[group_P != group], accuracy_P[group_P != group], sigmoid, chance is not None
            )
            for group in range(len(law.left_out))
        ),
        loss_P=loss_P,
        mean_error=float(np.abs(accuracy_P - sigmoid.at(loss_P)).mean()),
    )


def fit_sigmoid(
    loss_P: Array, accuracy_P: Array, chance: float | None = None, ceiling: float = 1.0
) -> Sigmoid:
    """Least squares of the sigmoid that ends at `ceiling` for a loss of 0."""
    if len(loss_P) < FEWEST_RUNS or np.ptp(loss_P) <= 0:
        raise DataError(
            f"{counted(len(loss_P), 'run')} with a loss and an accuracy, at "
            f"{counted(len(np.unique(loss_P)), 'loss')}: a sigmoid needs at least {FEWEST_RUNS}"
        )
    if accuracy_P.min() < 0 or accuracy_P.max() > 1:
        raise DataError(
            f"accuracies from {accuracy_P.min():g} to {accuracy_P.max():g}: expected fractions "
            "from 0 to 1; divide percentages by 100"
        )
    found = f"accuracies from {accuracy_P.min():g} to {accuracy_P.max():g}"
    is_flat = np.ptp(accuracy_P) <= 0 or accuracy_P.max() <= (chance or 0.0)
    if is_flat or np.corrcoef(loss_P, accuracy_P)[0, 1] > 0:
        raise DataError(
            f"{found} do not rise above {chance or 0:.3g} where the loss falls: a sigmoid needs "
            "runs above chance, and a loss that explains it; add better runs, correct --chance, or "
            "name another column with --task-loss"
        )
    if accuracy_P.max() > ceiling:
        raise DataError(f"{found} are above --ceiling {ceiling:g}")
    width = float(np.ptp(loss_P))
    floor = min(float(accuracy_P.min()), 0.999 * ceiling) if chance is None else chance
    ends = [
        _least_squares(loss_P, accuracy_P, start, chance is not None)
        for part in STARTS
        for steepness in STEEPNESS
        if (start := Sigmoid(floor, ceiling, steepness / width, loss_P.min() + part * width))
    ]
    return min(ends, key=lambda end: float(((end.at(loss_P) - accuracy_P) ** 2).sum()))


def _pairs(points: Points) -> Points:
    """The runs with an accuracy that are not held out."""
    assert points.accuracy_P is not None
    has_P = np.isfinite(points.accuracy_P)
    missing_P = ~has_P & ~points.holdout_P & (points.progress_P >= FINISHED)
    if missing_P.any():
        raise DataError(
            f"{points.source}: {counted(int(missing_P.sum()), 'run')} without an accuracy, such as "
            f"{points.names[missing_P.argmax()]}; measure it, or exclude them with --exclude"
        )
    return points.take(has_P & ~points.holdout_P)


def _least_squares(loss_P: Array, accuracy_P: Array, start: Sigmoid, is_known: bool) -> Sigmoid:
    """The nearest least squares to `start`, with its ceiling, and its floor where it `is_known`."""
    from scipy.optimize import least_squares

    def sigmoid(numbers: Array) -> Sigmoid:
        log_steepness, middle = (float(number) for number in numbers[:2])
        floor = start.floor if is_known else float(numbers[2])
        return Sigmoid(floor, start.ceiling, float(np.exp(log_steepness)), middle)

    first, low, high = [np.log(start.steepness), start.middle], [-np.inf] * 2, [np.inf] * 2
    if not is_known:
        first, low, high = [*first, start.floor], [*low, 0.0], [*high, start.ceiling]
    solution = least_squares(
        lambda numbers: sigmoid(numbers).at(loss_P) - accuracy_P, first, bounds=(low, high)
    )
    return sigmoid(solution.x)
