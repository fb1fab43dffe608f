"""Confidence regions of curves that are linear in all but one or two of their numbers.

A region holds every curve whose sum of squared relative errors is at most (1 + t^2/f) times the
least one, with t Student's quantile at f degrees of freedom. The range of any quantity over the
region (its loss somewhere, an optimum, an exponent) is that quantity's profile interval: it does
not depend on how the curve is parametrized, is as lopsided as the losses say, and grows without
bound where they determine nothing. A bootstrap of so few runs does neither.

Legend: G cells of the grid of exponents, U directions, J coefficients (all >= 0), K curves.
Source: Bates and Watts 1988, "Nonlinear Regression Analysis", section 6.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pretrain.scaling.points import Array

SMALLEST_NOISE = 1e-6  # relative; a fit closer than this is exact for all that losses can say
FEWEST_FREE = 2  # degrees of freedom; with one, Student's t is 12.7 and no interval says anything
TWO_SIDED = 0.975  # quantile of Student's t for an interval of 95%
ROUNDS = 14  # of finer grids
ENOUGH = 1 / 8  # of a grid's cells inside
MOST_CELLS = 300  # that become curves of the region
AROUND = {2: 16, 3: 64}  # directions that cover a circle, a sphere
RIDGE = 1e-13


def allowed_excess(
    least: float, free: int, noise: float = SMALLEST_NOISE, quantile: float = TWO_SIDED
) -> float:
    """How far above the least sum of squares (relative errors) a curve of the region may be.

    `noise` is what single losses are known to err by; the errors of a fit may be smaller by chance.
    """
    from scipy.special import stdtrit

    assert free > 0
    return float(stdtrit(free, quantile)) ** 2 * max(least / free, noise**2, SMALLEST_NOISE**2)


@dataclass(frozen=True)
class GridRegion:
    """The part of a grid of two numbers where the least squares are small enough."""

    axes: tuple[Array, Array]
    inside_AB: Array
    least: float
    allowed: float  # least squares of the region's border

    def cells(self) -> tuple[Array, Array]:
        """Both numbers of every cell inside, [G]."""
        first, second = np.meshgrid(*self.axes, indexing="ij")
        return first[self.inside_AB], second[self.inside_AB]


def grid_region(
    axes: tuple[Array, Array],
    squares_of: Callable[[Array, Array], Array],
    free: int,
    noise: float,
    quantile: float = TWO_SIDED,
) -> GridRegion:
    """Grids finer and finer around what is inside, until ENOUGH of its cells are."""
    least = np.inf
    region = None
    for _ in range(ROUNDS):
        squares_AB = squares_of(*axes)
        least = min(least, float(squares_AB.min()))
        allowed = least + allowed_excess(least, free, noise, quantile)
        inside_AB = (squares_AB <= allowed) | (squares_AB == squares_AB.min())
        region = GridRegion(axes, inside_AB, least, allowed)
        if inside_AB.mean() >= ENOUGH:
            break
        axes = _around(axes[0], inside_AB.any(axis=1)), _around(axes[1], inside_AB.any(axis=0))
    assert region
    return region


def _around(values: Array, inside: Array) -> Array:
    """A finer grid of what is inside and one cell more on either side."""
    chosen = np.flatnonzero(inside)
    low, high = values[max(chosen[0] - 1, 0)], values[min(chosen[-1] + 1, len(values) - 1)]
    return np.linspace(low, high, len(values))


def directions(dimensions: int) -> Array:
    """Unit vectors that cover all directions, [U, J], and the zero vector."""
    count = AROUND[dimensions]
    if dimensions == 2:
        angle_U = np.linspace(0, 2 * np.pi, count, endpoint=False)
        around = np.stack([np.cos(angle_U), np.sin(angle_U)], axis=1)
    else:
        height_U = (2 * np.arange(count) + 1) / count - 1
        angle_U = np.pi * (1 + 5**0.5) * np.arange(count)  # Fibonacci's lattice
        radius_U = np.sqrt(1 - height_U**2)
        around = np.stack([radius_U * np.cos(angle_U), radius_U * np.sin(angle_U), height_U], 1)
    return np.concatenate([np.zeros((1, dimensions)), around])


def best_nonnegative(gram: Array, target: Array) -> tuple[Array, Array]:
    """Coefficients >= 0 of least squares for every cell [G, J], and by how much they lower it."""
    count = target.shape[-1]
    best, best_gain = np.zeros(target.shape), np.zeros(target.shape[:-1])
    for bits in range(1, 2**count):
        chosen = [index for index in range(count) if bits >> index & 1]
        part = gram[..., np.ix_(chosen, chosen)[0], np.ix_(chosen, chosen)[1]]
        solution = np.linalg.solve(_ridged(part), target[..., chosen, None])[..., 0]
        gain = (solution * target[..., chosen]).sum(axis=-1)
        better = (solution >= 0).all(axis=-1) & (gain > best_gain)
        full = np.zeros(target.shape)
        full[..., chosen] = solution
        best = np.where(better[..., None], full, best)
        best_gain = np.where(better, gain, best_gain)
    return best, best_gain


def coefficients_within(
    gram: Array, target: Array, best: Array, slack_G: Array
) -> tuple[Array, Array]:
    """Coefficients >= 0 [K, J] at which the cells' squares are `slack_G` above the best, and the
    cell of each.
    """
    chosen = np.arange(len(best))
    if len(chosen) > MOST_CELLS:
        chosen = np.linspace(0, len(best) - 1, MOST_CELLS).round().astype(int)
    gram, target, best, slack_G = (x[chosen] for x in (gram, target, best, slack_G))
    root = np.linalg.cholesky(_ridged(gram))
    # Columns of the inverse transpose have d' gram d = 1: the squares are a ball in these units.
    step_GUJ = directions(best.shape[-1]) @ np.linalg.inv(root)
    slope_GU = ((gram @ best[..., None])[..., 0] - target)[:, None] @ step_GUJ.transpose(0, 2, 1)
    slope_GU = slope_GU[:, 0]
    length_GU = np.sqrt(slope_GU**2 + slack_G[:, None]) - slope_GU
    with np.errstate(divide="ignore", invalid="ignore"):
        room_GUJ = np.where(step_GUJ < 0, -best[:, None] / step_GUJ, np.inf)
    length_GU = np.minimum(length_GU, room_GUJ.min(axis=-1))
    found = best[:, None] + length_GU[..., None] * step_GUJ
    cell_GU = np.broadcast_to(chosen[:, None], length_GU.shape)
    return np.maximum(found, 0.0).reshape(-1, best.shape[-1]), cell_GU.ravel()


def _ridged(gram: Array) -> Array:
    diagonal = gram.diagonal(axis1=-2, axis2=-1).max(axis=-1)
    return gram + RIDGE * np.eye(gram.shape[-1]) * diagonal[..., None, None]
