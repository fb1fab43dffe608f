"""Approach 3's intervals: percentiles of the same Huber fit to resamples of the budgets.

Runs of one budget share more than noise (a batch size, a rule for the rate, a bug), so whole
budgets are drawn with replacement, not runs; one fewer than there are, since as many would make a
few budgets look less scattered than they are. All resamples are fitted at once, from the fit to all
runs: Levenberg-Marquardt steps on Huber's loss as reweighted least squares. Legend: K resamples,
P points, F budgets.

Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13; Rao and Wu 1988
for the number of draws.
"""

from __future__ import annotations

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.huber_fit import ParametricFit, uncenter
from pretrain.scaling.law import log_terms
from pretrain.scaling.points import Array, Points

RESAMPLES = 1000
FEWEST_BUDGETS = 5  # with four, intervals of the loss held the truth in fewer than 92% of sweeps
MOST_NUMBERS = 4_000_000  # losses in all resamples together: 100,000 runs get 40 resamples
STEPS = 100
ENOUGH = 1e-7  # a step that gains less than this part of the objective is the last one


def resampled_laws(points: Points, fit: ParametricFit) -> Array:
    """The laws theta [K, 5] of the resamples; DataError where there are too few budgets."""
    budgets, budget_P = np.unique(points.budget_P, return_inverse=True)
    if len(budgets) < FEWEST_BUDGETS:
        raise DataError(
            f"{len(budgets)} budgets, and a bootstrap of budgets needs {FEWEST_BUDGETS}; add one"
        )
    rng = np.random.default_rng(0)
    count = max(min(RESAMPLES, MOST_NUMBERS // len(points)), 40)
    shares_F = np.full(len(budgets), 1 / len(budgets))
    drawn_KF = rng.multinomial(len(budgets) - 1, shares_F, count)
    n_P, d_P = np.log(points.parameters_P), np.log(points.tokens_P)
    center = np.array([n_P.mean(), d_P.mean()])
    theta = np.repeat(uncenter(fit.law.theta, -center)[None], count, axis=0)
    data = n_P - center[0], d_P - center[1], np.log(points.loss_P)
    return uncenter(refitted(theta, *data, drawn_KF[:, budget_P], fit.delta), center)


def refitted(
    theta: Array, n_P: Array, d_P: Array, l_P: Array, weight_KP: Array, delta: float
) -> Array:
    """Every row of theta [K, 5] moved to the least weighted sum of Huber's loss near it."""
    damping = np.full(len(theta), 1e-3)
    residual, jacobian = _linearized(theta, n_P, d_P, l_P)
    objective = _huber(residual, weight_KP, delta)
    for _ in range(STEPS):
        pull_KP = weight_KP * np.minimum(1, delta / np.maximum(np.abs(residual), 1e-300))
        weighted = jacobian * pull_KP[:, None]
        hessian = weighted @ jacobian.swapaxes(1, 2)
        diagonal = np.einsum("kii->ki", hessian)
        hessian = hessian + (damping[:, None] * diagonal + 1e-14)[..., None] * np.eye(5)
        gradient = weighted @ residual[..., None]
        moved = theta - np.linalg.solve(hessian, gradient)[..., 0]
        with np.errstate(over="ignore", invalid="ignore"):  # a step too far is not taken
            new_residual, new_jacobian = _linearized(moved, n_P, d_P, l_P)
            new_objective = _huber(new_residual, weight_KP, delta)
        better = new_objective <= objective
        gain = np.where(better, objective - new_objective, 0)
        is_done = bool((gain <= ENOUGH * objective).all() and better.mean() > 0.9)
        theta = np.where(better[:, None], moved, theta)
        residual = np.where(better[:, None], new_residual, residual)
        jacobian = np.where(better[:, None, None], new_jacobian, jacobian)
        objective = np.where(better, new_objective, objective)
        damping = np.where(better, np.maximum(damping / 5, 1e-9), damping * 8)
        if is_done:
            break
    return theta


def _linearized(theta: Array, n_P: Array, d_P: Array, l_P: Array) -> tuple[Array, Array]:
    """ln L - ln loss [K, P], and its derivatives by theta [K, 5, P]."""
    terms = log_terms(theta, n_P, d_P)
    peak = terms.max(axis=1, keepdims=True)
    shares = np.exp(terms - peak)
    total = shares.sum(axis=1, keepdims=True)
    shares /= total
    residual = (peak + np.log(total))[:, 0] - l_P
    by_exponents = -shares[:, 1:] * np.stack([n_P, d_P])
    return residual, np.concatenate([shares, by_exponents], axis=1)


def _huber(residual_KP: Array, weight_KP: Array, delta: float) -> Array:
    size = np.abs(residual_KP)
    values = np.where(size <= delta, 0.5 * size**2, delta * (size - 0.5 * delta))
    return (weight_KP * values).sum(axis=1)
