"""From size and data to the accuracy of a task, in two steps, each checked on runs it did not see.

A task's loss follows L(N, D) (approach 3), and its accuracy a sigmoid of that loss. Accuracies
alone follow no power law: they are flat at chance for small models, and flat again at the top.
Source: Bhagia et al. 2024 (the OLMo ladder). Legend: P runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foundation.errors import DataError
from pretrain.scaling.fit import Fit, fit_all
from pretrain.scaling.frontier import law_of
from pretrain.scaling.intervals import MOST_GROUPS, Interval, jackknife
from pretrain.scaling.law import fit_parametric, loss_at
from pretrain.scaling.predict import loss_of_run
from pretrain.scaling.table import FINISHED, Array, Points, usable
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
        return self.floor + (self.ceiling - self.floor) * _fall(loss, self.steepness, self.middle)


@dataclass(frozen=True, kw_only=True)
class TaskFit:
    """Both steps, with what their errors are."""

    fit: Fit  # of the task's loss
    sigmoid: Sigmoid
    left_out: tuple[Sigmoid, ...]  # each without a group of budgets; none without an interval
    loss_P: Array
    accuracy_P: Array
    mean_error: float  # of the accuracy, by the sigmoid at the measured losses

    def predict(self, parameters: float, tokens: float) -> tuple[Interval, Interval]:
        """The loss and accuracy of a run; both steps are fitted without each group of budgets."""
        loss = loss_of_run(self.fit, parameters, tokens)
        value = float(self.sigmoid.at(loss.value))
        law = self.fit.law
        if not (self.left_out and law and law.left_out):
            return loss, Interval(value, math.nan, math.nan)
        loss_G = loss_at(law_of(law.left_out).theta, np.log(parameters), np.log(tokens))
        pairs = zip(self.left_out, loss_G, strict=True)
        accuracy_G = np.array([sigmoid.at(loss) for sigmoid, loss in pairs])
        accuracy = jackknife(value, accuracy_G, law.free, is_linear=True)
        return loss, replace(accuracy, low=max(accuracy.low, 0.0), high=min(accuracy.high, 1.0))

    def extrapolated(self, loss: float) -> float:
        """How far below the measured losses a loss is, as a part of their width."""
        return float((self.loss_P.min() - loss) / np.ptp(self.loss_P))


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """One run of the largest budget, predicted from runs of the smaller ones."""

    name: str
    loss: float
    predicted_loss: float
    accuracy: float
    from_measured_loss: float  # the second step alone
    predicted_accuracy: float  # both


def fit_task(
    runs: Points, accuracies: Mapping[str, float], chance: float | None = None, ceiling: float = 1.0
) -> TaskFit:
    """Fit both steps; the points' losses are the task's. `chance` and `ceiling`: known ends.

    Mid-schedule rows with an accuracy are pairs of the second step. DataError for too few runs, or
    accuracies that do not fall with the loss.
    """
    fit = fit_all(runs)
    chosen, loss_P, accuracy_P = _pairs(runs, accuracies)
    sigmoid = fit_sigmoid(loss_P, accuracy_P, chance, ceiling)
    log_budgets = np.log(fit.points.budgets)
    near_P = np.abs(np.log(chosen.budget_P)[:, None] - log_budgets).argmin(axis=1)
    left_out = []
    for group in np.unique(near_P % MOST_GROUPS):
        rest = near_P % MOST_GROUPS != group
        left_out.append(_least_squares(loss_P[rest], accuracy_P[rest], sigmoid, chance is not None))
    residual_P = accuracy_P - sigmoid.at(loss_P)
    return TaskFit(
        fit=fit,
        sigmoid=sigmoid,
        left_out=tuple(left_out),
        loss_P=loss_P,
        accuracy_P=accuracy_P,
        mean_error=float(np.abs(residual_P).mean()),
    )


def backtest(
    runs: Points, accuracies: Mapping[str, float], chance: float | None = None, ceiling: float = 1.0
) -> list[Backtest]:
    """Predict the runs of the largest budget from the others, by each step and by both.

    DataError if those below it do not allow it.
    """
    points = usable(runs)
    last = points.take(points.budget_P == points.budgets[-1])
    rest = runs.take(runs.budget_P < points.budgets[-1])
    law = fit_parametric(usable(rest)).law
    sigmoid = fit_sigmoid(*_pairs(rest, accuracies)[1:], chance, ceiling)
    predicted_P = law.loss(last.parameters_P, last.tokens_P)
    _, loss_P, accuracy_P = _pairs(last, accuracies)
    return [
        Backtest(
            name=name,
            loss=float(loss),
            predicted_loss=float(predicted),
            accuracy=float(accuracy),
            from_measured_loss=float(sigmoid.at(loss)),
            predicted_accuracy=float(sigmoid.at(predicted)),
        )
        for name, loss, predicted, accuracy in zip(
            last.names, loss_P, predicted_P, accuracy_P, strict=True
        )
    ]


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
    rising = f"accuracies from {accuracy_P.min():g} to {accuracy_P.max():g} do not rise above "
    if np.ptp(accuracy_P) <= 0:
        raise DataError(f"{rising}each other: a sigmoid needs runs above chance; add better runs")
    if np.corrcoef(loss_P, accuracy_P)[0, 1] > 0:
        raise DataError(
            "the accuracy rises with the loss, so this loss does not explain it; name another "
            "column with --task-loss"
        )
    if accuracy_P.max() <= (chance or 0.0):
        raise DataError(
            f"{rising}{chance:.3g}: a sigmoid needs runs above chance; add better runs, or "
            "correct --chance"
        )
    if accuracy_P.max() > ceiling:
        raise DataError(f"accuracies up to {accuracy_P.max():g} are above --ceiling {ceiling:g}")
    width = float(np.ptp(loss_P))
    floor = min(float(accuracy_P.min()), 0.999 * ceiling) if chance is None else chance
    ends = [
        _least_squares(loss_P, accuracy_P, start, chance is not None)
        for part in STARTS
        for steepness in STEEPNESS
        if (start := Sigmoid(floor, ceiling, steepness / width, loss_P.min() + part * width))
    ]
    return min(ends, key=lambda end: float(((end.at(loss_P) - accuracy_P) ** 2).sum()))


def _pairs(points: Points, accuracies: Mapping[str, float]) -> tuple[Points, Array, Array]:
    """The runs that are not held out, their losses and accuracies."""
    has_P = np.array([name in accuracies for name in points.names])
    missing_P = ~has_P & ~points.holdout_P & (points.progress_P >= FINISHED)
    if missing_P.any():
        raise DataError(
            f"{points.source}: {counted(int(missing_P.sum()), 'run')} without an accuracy, such as "
            f"{points.names[missing_P.argmax()]}; measure it, or exclude them with --exclude"
        )
    chosen = points.take(has_P & ~points.holdout_P)
    return chosen, chosen.loss_P, np.array([accuracies[name] for name in chosen.names])


def _least_squares(loss_P: Array, accuracy_P: Array, start: Sigmoid, is_known: bool) -> Sigmoid:
    """The nearest least squares to `start`, with its ceiling, and its floor where it `is_known`."""
    from scipy.optimize import least_squares

    def sigmoid(numbers: Array) -> Sigmoid:
        log_steepness, middle = (float(each) for each in numbers[:2])
        floor = start.floor if is_known else float(numbers[2])
        return Sigmoid(floor, start.ceiling, float(np.exp(log_steepness)), middle)

    first, low, high = [np.log(start.steepness), start.middle], [-np.inf] * 2, [np.inf] * 2
    if not is_known:
        first, low, high = [*first, start.floor], [*low, 0.0], [*high, start.ceiling]
    found = least_squares(
        lambda numbers: sigmoid(numbers).at(loss_P) - accuracy_P, first, bounds=(low, high)
    )
    return sigmoid(found.x)


def _fall(loss: float | Array, steepness: float, middle: float) -> Array:
    """1 for a loss of 0, falling to 0."""
    return 1 / (1 + np.exp(np.clip(steepness * (np.asarray(loss) - middle), -500, 500)))
