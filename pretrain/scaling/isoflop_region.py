"""Approach 2's confidence region: power laws of N* and of the loss that the valleys allow.

Sizes: parabolas whose lowest points are on one line ln N* = k + a ln C. Given the line, each budget
has a level and a bend >= 0, a linear problem; the line is named by its sizes at the first and the
last budget, and a grid over the two finds all lines within the region. Where it reaches far outside
of the sizes, the noise allows valleys without a lowest size, and there is no interval.

Losses: E + m C^-g through the levels, for every g the pairs (E, m) within the region. It includes
E = 0 and E near the last level: with few budgets the interval beyond them is as wide as that.

Legend: F budgets, S runs of one budget, G cells of a grid, K curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.frontier import Frontier
from pretrain.scaling.parabola import FARTHEST_VERTEX, frame, parabola_through
from pretrain.scaling.points import Array, Points
from pretrain.scaling.regions import (
    FEWEST_FREE,
    SMALLEST_NOISE,
    GridRegion,
    allowed_excess,
    best_nonnegative,
    coefficients_within,
    grid_region,
)
from pretrain.scaling.seeds import known_noise, observations

GRID = 96
# Of Student's t for the lines. Where noise nearly hides the valleys, the sweeps that have an
# interval are those whose noise looks small: 0.975 held the truth in 91 to 94% of them.
QUANTILE = 0.985
DECAYS = np.geomspace(0.003, 2.0, 200)


@dataclass(frozen=True)
class Valleys:
    """The runs of the budgets that have a valley; losses are relative to the budget's mean."""

    x_F: Array  # ln C
    n_FS: Sequence[Array]  # ln N
    level_F: Array  # mean loss
    loss_FS: Sequence[Array]
    noise: float  # that single losses are known to have

    @property
    def free(self) -> int:
        """Runs in excess of the numbers fitted: a level and a bend per budget, and the line."""
        return sum(map(len, self.n_FS)) - 2 * len(self.x_F) - 2


def isoflop_region(points: Points, budgets: Sequence[float]) -> Frontier:
    """The region of these budgets' valleys; DataError with the reason where there is none."""
    points = points.take(np.isin(points.budget_P, budgets))
    points = observations(points, _parabola_losses(points), 3 * len(budgets))
    valleys = _valleys(points, budgets)
    if valleys.free < FEWEST_FREE:
        raise DataError(
            f"{sum(map(len, valleys.n_FS))} losses for {2 * len(budgets) + 2} numbers (a level and "
            "a bend per budget and a line) leave nothing to measure the noise by; add sizes"
        )
    region = _size_lines(valleys)
    first_K, last_K = region.cells()
    first, last = first_K.mean(), last_K.mean()
    width = valleys.x_F[-1] - valleys.x_F[0]
    center = float(valleys.x_F.mean())
    power_K = (last_K - first_K) / width
    log_scale_K = first_K + power_K * (center - valleys.x_F[0])
    at_F = first + (last - first) * (valleys.x_F - valleys.x_F[0]) / width
    floor, log_loss_scale, decay = _loss_curves(valleys, at_F, region.least, center)
    count = max(len(power_K), len(decay))
    rng = np.random.default_rng(0)  # which loss goes with which line; together they are a product

    def filled(values: Array) -> Array:
        return np.concatenate([values, rng.choice(values, count - len(values))])

    pick_line = filled(np.arange(len(power_K)))
    pick_loss = rng.permutation(filled(np.arange(len(decay))))
    return Frontier(
        log_scale=log_scale_K[pick_line],
        power=power_K[pick_line],
        floor=floor[pick_loss],
        log_loss_scale=log_loss_scale[pick_loss],
        decay=decay[pick_loss],
        center=center,
    )


def _valleys(points: Points, budgets: Sequence[float]) -> Valleys:
    masks = [points.budget_P == budget for budget in budgets]
    level_F = np.array([points.loss_P[mask].mean() for mask in masks])
    return Valleys(
        x_F=np.log(budgets),
        n_FS=[np.log(points.parameters_P[mask]) for mask in masks],
        level_F=level_F,
        noise=known_noise(points),
        loss_FS=[points.loss_P[mask] / level for mask, level in zip(masks, level_F, strict=True)],
    )


def _parabola_losses(points: Points) -> Array:
    """Each run's loss by its own budget's parabola."""
    predicted_P = np.empty(len(points))
    for budget in points.budgets:
        mine = points.budget_P == budget
        n_S = np.log(points.parameters_P[mine])
        predicted_P[mine] = parabola_through(n_S, points.loss_P[mine], n_S)
    return predicted_P


def _size_lines(valleys: Valleys) -> GridRegion:
    """Lines through the lowest sizes, by their sizes ln N* at the first and the last budget."""
    axes = []
    for index in (0, -1):
        middle, half = frame(valleys.n_FS[index])
        axes.append(middle + half * np.linspace(-FARTHEST_VERTEX, FARTHEST_VERTEX, GRID))
    box = axes[0], axes[1]
    squares_of = partial(_squares_on_line, valleys)
    region = grid_region(box, squares_of, valleys.free, valleys.noise, QUANTILE)
    for values, axis, x in zip(region.cells(), box, valleys.x_F[[0, -1]], strict=True):
        if values.min() <= axis[0] or values.max() >= axis[-1]:
            raise DataError(
                f"its valleys are too shallow for the noise: the lowest size at {np.exp(x):.3g} "
                "FLOPs may be far outside of the sizes; add runs or sizes farther apart"
            )
    return region


def _squares_on_line(valleys: Valleys, first: Array, last: Array) -> Array:
    """The least squares of all budgets' parabolas whose lowest points are on each line."""
    share_F = (valleys.x_F - valleys.x_F[0]) / (valleys.x_F[-1] - valleys.x_F[0])
    total = np.zeros((len(first), len(last)))
    for share, n_S, loss_S in zip(share_F, valleys.n_FS, valleys.loss_FS, strict=True):
        lowest = (1 - share) * first[:, None] + share * last
        square = (n_S - lowest[..., None]) ** 2
        square -= square.mean(axis=-1, keepdims=True)
        rest_S = loss_S - loss_S.mean()
        joint = square @ rest_S
        bend = np.maximum(joint, 0) / np.maximum((square**2).sum(axis=-1), 1e-300)
        total += rest_S @ rest_S - bend * joint
    return total


def _loss_curves(
    valleys: Valleys, at_F: Array, least: float, center: float
) -> tuple[Array, Array, Array]:
    """Floors, ln scales and decays of the region of E + m C^-g through the valleys' levels."""
    noise = max(least / valleys.free, valleys.noise**2, SMALLEST_NOISE**2)
    level_F, variance_F = np.empty((2, len(at_F)))
    for index, (n_S, loss_S) in enumerate(zip(valleys.n_FS, valleys.loss_FS, strict=True)):
        terms_S3 = (n_S - at_F[index])[:, None] ** np.arange(3)
        inverse = np.linalg.pinv(terms_S3)
        scale = valleys.level_F[index]
        level_F[index] = scale * (inverse @ loss_S)[0]
        variance_F[index] = scale**2 * (inverse @ inverse.T)[0, 0] * noise
    x_F, weight_F = valleys.x_F - center, 1 / variance_F
    curve_GF = np.exp(-np.outer(DECAYS, x_F))
    gram = np.empty((len(DECAYS), 2, 2))
    gram[:, 0, 0] = weight_F.sum()
    gram[:, 0, 1] = gram[:, 1, 0] = curve_GF @ weight_F
    gram[:, 1, 1] = curve_GF**2 @ weight_F
    target = np.stack(
        [np.full(len(DECAYS), weight_F @ level_F), curve_GF @ (weight_F * level_F)], 1
    )
    best, gain = best_nonnegative(gram, target)
    excess_G = np.maximum(weight_F @ level_F**2 - gain, 0.0)
    # Squares are in units of the noise, which the parabolas measure.
    free = valleys.free + 2 - len(at_F)
    allowed = excess_G.min() + allowed_excess(float(max(free, 1)), max(free, 1))
    inside_G = excess_G <= allowed
    found, cell = coefficients_within(
        gram[inside_G], target[inside_G], best[inside_G], allowed - excess_G[inside_G]
    )
    return found[:, 0], np.log(np.maximum(found[:, 1], 1e-300)), DECAYS[inside_G][cell]
