"""Approach 3's confidence region: the laws that fit the runs nearly as well as the best one.

For given exponents the law is linear in E, A and B, so the region is found exactly: a grid over
(alpha, beta), finer and finer around what is inside, and an ellipsoid of (E, A, B) in each cell.
Errors are relative. None counts more than TOLERATED standard deviations, so that an outlier neither
moves nor widens the region as its square would.

Legend: P points, G cells, K laws.
"""

from __future__ import annotations

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.huber_fit import ParametricFit, uncenter
from pretrain.scaling.points import Array, Points
from pretrain.scaling.projection import normal_equations
from pretrain.scaling.regions import (
    FEWEST_FREE,
    best_nonnegative,
    coefficients_within,
    grid_region,
)
from pretrain.scaling.seeds import known_noise, observations

NUMBERS = 5
BOX = (0.01, 3.0)  # of alpha and beta
GRID = 56
ABSENT = 1e-40  # of a term that is 0, for its logarithm: its optimum is then beyond all bounds
TOLERATED = 2.5  # standard deviations


def parametric_region(points: Points, fit: ParametricFit) -> Array:
    """The laws theta [K, 5] of the region; DataError with the reason where there is none."""
    predicted_P = fit.law.loss(points.parameters_P, points.tokens_P)
    points = observations(points, predicted_P, NUMBERS)
    if len(points) - NUMBERS < FEWEST_FREE:
        raise DataError(
            f"{len(points)} losses for {NUMBERS} numbers leave nothing to measure the noise by; "
            "add runs"
        )
    predicted_P = fit.law.loss(points.parameters_P, points.tokens_P)
    n_P, d_P = np.log(points.parameters_P), np.log(points.tokens_P)
    center = np.array([n_P.mean(), d_P.mean()])
    weight_P = robust_weights(points.loss_P / predicted_P - 1) / predicted_P**2
    data = n_P - center[0], d_P - center[1], points.loss_P, weight_P

    def squares_of(log_alpha: Array, log_beta: Array) -> Array:
        normal = normal_equations(*data, np.exp(log_alpha), np.exp(log_beta))
        gain = best_nonnegative(normal.gram, normal.target)[1]
        return np.maximum(normal.squares - gain, 0.0).reshape(len(log_alpha), len(log_beta))

    box = np.linspace(np.log(BOX[0]), np.log(BOX[1]), GRID)
    region = grid_region((box, box), squares_of, len(points) - NUMBERS, known_noise(points))
    normal = normal_equations(*data, *np.exp(region.axes))
    inside_G = region.inside_AB.ravel()
    gram, target = normal.gram[inside_G], normal.target[inside_G]
    best, gain = best_nonnegative(gram, target)
    slack = np.maximum(region.allowed - np.maximum(normal.squares - gain, 0.0), 0.0)
    found, cell = coefficients_within(gram, target, best, slack)
    logs = np.log(np.maximum(found, ABSENT))
    exponents = [np.exp(values[cell]) for values in region.cells()]
    return uncenter(np.column_stack([logs, *exponents]), center)


def robust_weights(error_P: Array) -> Array:
    """Weights at which no error counts more than one of TOLERATED standard deviations."""
    bound = TOLERATED * noise_of(error_P)
    return (bound / np.maximum(np.abs(error_P), bound)) ** 2


def noise_of(error_P: Array) -> float:
    """The standard deviation of relative errors, of which none counts more than TOLERATED of it."""
    free = max(len(error_P) - NUMBERS, 1)
    scale = float(np.sqrt((error_P**2).sum() / free))
    for _ in range(30):
        bounded = np.minimum(np.abs(error_P), TOLERATED * scale)
        scale = max(float(np.sqrt((bounded**2).sum() / free)), 1e-12)
    return scale
