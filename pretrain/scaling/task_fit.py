"""From size and data to the accuracy of a task, in two steps, each checked on runs it did not see.

A task's loss follows L(N, D) (approach 3), and its accuracy a sigmoid of that loss. Accuracies
alone follow no power law: they are flat at chance for small models, and flat again at the top.
Source: Bhagia et al. 2024 (the OLMo ladder). Legend: P runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.estimates import estimate
from pretrain.scaling.fit import Fit, fit_all
from pretrain.scaling.intervals import ENDS, Interval
from pretrain.scaling.points import Array, Points, usable
from pretrain.scaling.predict import loss_of_run
from pretrain.terminal.text import counted

FEWEST_RUNS = 6  # four numbers, and two runs to contradict them
DRAWS = 200
GRID = 24
STEEPNESS = (0.3, 30.0)  # of the sigmoid, times the width of the losses: what is searched


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
    draws: tuple[Sigmoid, ...]
    loss_P: Array
    accuracy_P: Array
    mean_error: float  # of the accuracy, by the sigmoid at the measured losses

    def predict(self, parameters: float, tokens: float) -> tuple[Interval, Interval]:
        """The loss and accuracy of a run.

        The accuracy's interval takes both ends of the loss's, so that it is wide enough for both
        steps; without one of the loss there is none.
        """
        loss = loss_of_run(self.fit, parameters, tokens)
        value = float(self.sigmoid.at(loss.value))
        if math.isnan(loss.low):  # no interval of the loss
            return loss, Interval(value, math.nan, math.nan)
        low, high = (
            np.percentile([float(each.at(end)) for each in self.draws], ENDS)
            for end in (loss.high, loss.low)
        )
        return loss, Interval(value, min(value, low[0]), max(value, high[1]))


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """One run of the largest budget, predicted from runs of the smaller ones."""

    name: str
    loss: float
    predicted_loss: float
    accuracy: float
    from_measured_loss: float  # the second step alone
    predicted_accuracy: float  # both


def fit_task(runs: Points, accuracies: Mapping[str, float], chance: float | None = None) -> TaskFit:
    """Fit both steps; the points' losses are the task's. `chance`: the known floor.

    DataError for too few runs, or accuracies that do not fall with the loss.
    """
    fit = fit_all(runs)
    loss_P, accuracy_P = _pairs(fit.points, accuracies)
    sigmoid = fit_sigmoid(loss_P, accuracy_P, chance)
    residual_P = accuracy_P - sigmoid.at(loss_P)
    return TaskFit(
        fit=fit,
        sigmoid=sigmoid,
        draws=_draws(sigmoid, loss_P, residual_P, chance),
        loss_P=loss_P,
        accuracy_P=accuracy_P,
        mean_error=float(np.abs(residual_P).mean()),
    )


def backtest(
    runs: Points, accuracies: Mapping[str, float], chance: float | None = None
) -> list[Backtest]:
    """Predict the runs of the largest budget from the others, by each step and by both.

    DataError if those below it do not allow it.
    """
    points = usable(runs)
    is_last_P = points.budget_P == points.budgets[-1]
    rest, last = points.take(~is_last_P), points.take(is_last_P)
    estimates = estimate(rest)
    if estimates.parametric is None:
        raise DataError(f"without the largest budget: {estimates.unavailable['parametric']}")
    law = estimates.parametric.law
    sigmoid = fit_sigmoid(*_pairs(rest, accuracies), chance)
    predicted_P = law.loss(last.parameters_P, last.tokens_P)
    loss_P, accuracy_P = _pairs(last, accuracies)
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


def fit_sigmoid(loss_P: Array, accuracy_P: Array, chance: float | None = None) -> Sigmoid:
    """Least squares: the best cell of a grid, where floor and ceiling are linear, then a solver."""
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
    found = _refined(_best_of_grid(loss_P, accuracy_P, chance), loss_P, accuracy_P, chance)
    if found.ceiling <= found.floor:
        raise DataError(
            f"{rising}{found.floor:.3g}: a sigmoid needs runs above chance; add better runs, or "
            "correct --chance"
        )
    return found


def _pairs(points: Points, accuracies: Mapping[str, float]) -> tuple[Array, Array]:
    missing = [name for name in points.names if name not in accuracies]
    if missing:
        raise DataError(
            f"{points.source}: {counted(len(missing), 'run')} without an accuracy, such as "
            f"{missing[0]}; measure it, or exclude them with --exclude"
        )
    return points.loss_P, np.array([accuracies[name] for name in points.names])


def _best_of_grid(loss_P: Array, accuracy_P: Array, chance: float | None) -> Sigmoid:
    width = float(np.ptp(loss_P))
    best, least = Sigmoid(0.0, 1.0, 1 / width, float(loss_P.mean())), np.inf
    for middle in np.linspace(loss_P.min() - width, loss_P.max(), GRID):
        for steepness in np.geomspace(*STEEPNESS, GRID) / width:
            fall_P = _fall(loss_P, steepness, middle)
            if chance is None:
                design = np.stack([1 - fall_P, fall_P], axis=-1)
                floor, ceiling = np.linalg.lstsq(design, accuracy_P, rcond=None)[0]
            else:
                rest = accuracy_P - chance * (1 - fall_P)
                floor, ceiling = chance, float((fall_P * rest).sum() / (fall_P**2).sum())
            low, high = np.clip([floor, ceiling], 0.0, 1.0)
            tried = Sigmoid(float(low), float(high), float(steepness), float(middle))
            error = float(((tried.at(loss_P) - accuracy_P) ** 2).sum())
            if error < least:
                best, least = tried, error
    return best


def _refined(start: Sigmoid, loss_P: Array, accuracy_P: Array, chance: float | None) -> Sigmoid:
    from scipy.optimize import least_squares

    def sigmoid(numbers: Array) -> Sigmoid:
        ceiling, log_steepness, middle = (float(each) for each in numbers[:3])
        floor = float(numbers[3]) if chance is None else chance
        return Sigmoid(floor, ceiling, float(np.exp(log_steepness)), middle)

    first = [start.ceiling, np.log(start.steepness), start.middle]
    low, high = [0.0, -np.inf, -np.inf], [1.0, np.inf, np.inf]
    if chance is None:
        first, low, high = [*first, start.floor], [*low, 0.0], [*high, 1.0]
    first = np.clip(first, np.array(low) + 1e-9, np.array(high) - 1e-9)
    found = least_squares(
        lambda numbers: sigmoid(numbers).at(loss_P) - accuracy_P, first, bounds=(low, high)
    )
    return sigmoid(found.x)


def _draws(
    fitted: Sigmoid, loss_P: Array, residual_P: Array, chance: float | None
) -> tuple[Sigmoid, ...]:
    """Sigmoids of resampled residuals, widened for the numbers that were fitted."""
    rng = np.random.default_rng(0)
    spare = max(1, len(loss_P) - (4 if chance is None else 3))
    pool = (residual_P - residual_P.mean()) * np.sqrt(len(loss_P) / spare)
    return tuple(
        _refined(fitted, loss_P, fitted.at(loss_P) + rng.choice(pool, len(pool)), chance)
        for _ in range(DRAWS)
    )


def _fall(loss: float | Array, steepness: float, middle: float) -> Array:
    """1 for a loss of 0, falling to 0."""
    return 1 / (1 + np.exp(np.clip(steepness * (np.asarray(loss) - middle), -500, 500)))
