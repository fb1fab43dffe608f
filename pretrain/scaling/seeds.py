"""Runs that differ only by their seed, and what they say about the noise.

Repeats count as single runs while their scatter explains how far the fit misses their means. Where
it misses them by more, the rest is the fit's own error, which more seeds do not average out: then
every size at its tokens is one observation, the mean of its runs.

Legend: P points, M means.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pretrain.scaling.points import Array, Points

EXPLAINED = 0.05  # chance below which repeats do not explain how far the fit misses their means


def groups_of(points: Points) -> Array:
    """The number of the group of equal N and D that each run belongs to."""
    pairs = np.stack([points.parameters_P, points.tokens_P], axis=1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def observations(points: Points, predicted_P: Array, numbers: int) -> Points:
    """The runs, or their means over repeats where those are what a fit of `numbers` misses."""
    from scipy.special import fdtrc

    group_P = groups_of(points)
    count_M = np.bincount(group_P)
    free, spare = len(points) - len(count_M), len(count_M) - numbers
    if free < 1 or spare < 1:
        return points
    error_P = points.loss_P / predicted_P - 1
    mean_M = np.bincount(group_P, error_P) / count_M
    scatter = float(((error_P - mean_M[group_P]) ** 2).sum()) / free
    missed = float((count_M * mean_M**2).sum()) / spare
    if fdtrc(spare, free, missed / max(scatter, 1e-300)) > EXPLAINED:
        return points
    first_M = np.unique(group_P, return_index=True)[1]
    loss_M = np.bincount(group_P, points.loss_P) / count_M
    return replace(points.take(first_M), loss_P=loss_M)


def seed_spread(points: Points) -> float | None:
    """The relative standard deviation of losses over seeds; None if no run was repeated."""
    group_P = groups_of(points)
    count_M = np.bincount(group_P)
    free = len(points) - len(count_M)
    if not free:
        return None
    log_P = np.log(points.loss_P)
    rest_P = log_P - (np.bincount(group_P, log_P) / count_M)[group_P]
    return float(np.sqrt((rest_P**2).sum() / free))


def known_noise(points: Points) -> float:
    """The root mean square of the losses' own relative errors, where a column has them; else 0."""
    return float(np.sqrt(np.mean((points.error_P / points.loss_P) ** 2)))
