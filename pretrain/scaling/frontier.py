"""The compute-optimal frontier: the best size N* and its loss at C training FLOPs, by a law or by
power laws.

Legend: K lines that an interval is read from, F places (budgets) on the frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pretrain.scaling.intervals import Interval, interval, range_of
from pretrain.scaling.law import FlopsLaw, exponents, log_optimum, loss_at
from pretrain.scaling.points import Array


class Line(Protocol):
    """A compute-optimal line (one, or all that an interval is read from)."""

    def log_parameters(self, log_flops: float | Array) -> Array: ...

    def loss(self, log_flops: float | Array) -> Array: ...

    def exponents(self, flops_law: FlopsLaw) -> tuple[Array, Array]: ...


@dataclass(frozen=True)
class LawLine:
    """The optimal line that laws theta [5] or [K, 5] imply."""

    theta: Array
    flops_law: FlopsLaw

    def log_parameters(self, log_flops: float | Array) -> Array:
        """ln N* at C FLOPs."""
        return log_optimum(self.theta, log_flops, self.flops_law)[0]

    def loss(self, log_flops: float | Array) -> Array:
        """L(N*, D*) at C FLOPs."""
        n, d = log_optimum(self.theta, log_flops, self.flops_law)
        return loss_at(self.theta, n, d)

    def exponents(self, flops_law: FlopsLaw) -> tuple[Array, Array]:
        """The powers a, b of C in N* ~ C^a and D* ~ C^b."""
        return exponents(self.theta, flops_law)


def law_of(line: Line) -> LawLine:
    """The line as approach 3's, whose lines are all of laws."""
    assert isinstance(line, LawLine)
    return line


@dataclass(frozen=True)
class Approach:
    """One approach's line, the lines its intervals are read from (or why it has none), warnings.

    Those of a law are draws, whose percentiles are the ends; those of a frontier are the border of
    a region, whose range it is.
    """

    key: str
    title: str
    line: Line
    region: Line | None
    no_interval: str = ""
    warnings: tuple[str, ...] = ()

    def parameters(self, log_flops: float) -> Interval:
        """N* at C FLOPs."""
        return self.interval(lambda line: np.exp(line.log_parameters(log_flops)))

    def loss(self, log_flops: float) -> Interval:
        """The least loss at C FLOPs."""
        return self.interval(lambda line: line.loss(log_flops))

    def tokens(self, log_flops: float, flops_law: FlopsLaw) -> Interval:
        """D* at C FLOPs."""
        c = np.asarray(log_flops)
        return self.interval(lambda line: np.exp(flops_law.log_tokens(c, line.log_parameters(c))))

    def powers(self, flops_law: FlopsLaw) -> tuple[Interval, Interval]:
        """The exponents a and b."""
        a, b = self.intervals(lambda line: line.exponents(flops_law))
        return a, b

    def interval(self, value_of: Callable[[Line], Array]) -> Interval:
        """Any quantity of the line, with its interval."""
        return self.intervals(lambda line: (value_of(line),))[0]

    def intervals(self, values_of: Callable[[Line], Sequence[Array]]) -> list[Interval]:
        """Quantities that are found together, each with its interval."""
        values = values_of(self.line)
        if self.region is None:
            return [Interval(float(value), np.nan, np.nan) for value in values]
        pick = interval if isinstance(self.region, LawLine) else range_of
        with np.errstate(over="ignore"):  # an end that is infinite is open
            return [pick(*pair) for pair in zip(values, values_of(self.region), strict=True)]


FEWEST_FOR_FLOOR = 4  # places on the frontier, to tell a floor of the loss from a plain power law
DECAY_GRID = np.geomspace(0.005, 1.0, 120)
REFINEMENTS = 6  # each divides the grid's spacing by 5


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Optimal sizes and losses at any FLOPs; all fields are [] or [K]."""

    log_scale: Array  # ln k of N* = k C^a
    power: Array  # a
    floor: Array  # E of the loss E + m C^-g; 0 where there are too few budgets to see a floor
    log_loss_scale: Array  # ln m
    decay: Array  # g
    center: float  # ln C around which ln k and ln m are taken

    def log_parameters(self, log_flops: float | Array) -> Array:
        """ln N* at C FLOPs."""
        return self.log_scale + self.power * (np.asarray(log_flops) - self.center)

    def loss(self, log_flops: float | Array) -> Array:
        """The least loss at C FLOPs."""
        return self.floor + np.exp(
            self.log_loss_scale - self.decay * (np.asarray(log_flops) - self.center)
        )

    def exponents(self, flops_law: FlopsLaw) -> tuple[Array, Array]:
        """The powers a, b of C in N* ~ C^a and D* ~ C^b."""
        return self.power, 1 - flops_law.power * self.power


def fit_frontier(
    log_flops_F: Array, n_KF: Array, loss_KF: Array, weight_KF: Array | None = None
) -> Frontier:
    """Least-squares power laws through each row's positions; NaN below two positions."""
    there_KF = np.isfinite(n_KF) & np.isfinite(loss_KF)
    weight_KF = np.where(there_KF, 1.0 if weight_KF is None else weight_KF, 0.0)
    n_KF, loss_KF = np.where(there_KF, n_KF, 0.0), np.where(there_KF, loss_KF, 1.0)
    center = float(log_flops_F.mean())
    x_F = log_flops_F - center
    log_scale, power = _line(x_F, n_KF, weight_KF)
    if there_KF.shape[-1] >= FEWEST_FOR_FLOOR:
        floor, log_loss_scale, decay = _decay_to_floor(x_F, loss_KF, weight_KF)
    else:
        log_loss_scale, slope = _line(x_F, np.log(loss_KF), weight_KF)
        floor, decay = np.zeros_like(slope), -slope
    # One position determines no power.
    unknown = (weight_KF > 0).sum(axis=-1) < 2
    fields = (
        np.where(unknown, np.nan, value)
        for value in (log_scale, power, floor, log_loss_scale, decay)
    )
    names = ("log_scale", "power", "floor", "log_loss_scale", "decay")
    return Frontier(**dict(zip(names, fields, strict=True)), center=center)


def _line(x_F: Array, y_KF: Array, weight_KF: Array) -> tuple[Array, Array]:
    """Weighted least squares y = intercept + slope x for every row."""
    total = np.maximum(weight_KF.sum(axis=-1), 1e-300)
    x_mean, y_mean = (weight_KF * x_F).sum(axis=-1) / total, (weight_KF * y_KF).sum(axis=-1) / total
    dx_KF = x_F - x_mean[..., None]
    spread = (weight_KF * dx_KF**2).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = (weight_KF * dx_KF * (y_KF - y_mean[..., None])).sum(axis=-1) / spread
    return y_mean - slope * x_mean, slope


def _decay_to_floor(x_F: Array, loss_KF: Array, weight_KF: Array) -> tuple[Array, Array, Array]:
    """E >= 0, ln m and g >= 0 of E + m exp(-g x): linear in E and m, finer and finer grids of g."""
    rows = loss_KF.shape[:-1]
    grid = np.broadcast_to(DECAY_GRID, (*rows, len(DECAY_GRID)))
    ratio = np.log(DECAY_GRID[1] / DECAY_GRID[0])
    for _ in range(REFINEMENTS):
        error, _, _ = _linear_part(grid, x_F, loss_KF, weight_KF)
        best = np.take_along_axis(grid, error.argmin(axis=-1)[..., None], axis=-1)
        grid = best * np.exp(np.linspace(-ratio, ratio, 11))
        ratio /= 5
    error, floor, scale = _linear_part(grid, x_F, loss_KF, weight_KF)
    chosen = error.argmin(axis=-1)[..., None]
    floor, scale, decay = (
        np.take_along_axis(value, chosen, axis=-1)[..., 0] for value in (floor, scale, grid)
    )
    return floor, np.log(np.maximum(scale, 1e-300)), decay


def _linear_part(
    decay_KG: Array, x_F: Array, loss_KF: Array, weight_KF: Array
) -> tuple[Array, Array, Array]:
    """Squared error, floor E >= 0 and scale m >= 0 for each decay of each row."""
    curve = np.exp(-decay_KG[..., None] * x_F)
    w, y = weight_KF[..., None, :], loss_KF[..., None, :]
    total = np.maximum(w.sum(axis=-1), 1e-300)
    curve_mean, y_mean = (w * curve).sum(axis=-1) / total, (w * y).sum(axis=-1) / total
    spread = (w * (curve - curve_mean[..., None]) ** 2).sum(axis=-1)
    joint = (w * (curve - curve_mean[..., None]) * (y - y_mean[..., None])).sum(axis=-1)
    scale = np.maximum(joint / np.maximum(spread, 1e-300), 0.0)
    floor = y_mean - scale * curve_mean
    alone = (w * curve * y).sum(axis=-1) / np.maximum((w * curve**2).sum(axis=-1), 1e-300)
    # A negative floor would mean a negative loss at large C: then fit the scale without a floor.
    scale, floor = np.where(floor < 0, alone, scale), np.maximum(floor, 0.0)
    error = (w * (y - floor[..., None] - scale[..., None] * curve) ** 2).sum(axis=-1)
    return error, floor, scale
