"""Bootstrap of approach 3: the Huber fit repeated on resampled runs, vectorized over the draws.

Pairs are resampled: whole runs (N, D, loss) with replacement. That assumes nothing of the noise,
and there are enough runs for it: approach 3 fits five numbers to all of them, whereas approach 2
fits three numbers per budget (see `isoflop.isoflop_draws`).

The minimum is that of `huber_fit.minimize`. The method is Levenberg-Marquardt with Huber's weights,
because it batches: one step of all draws is a few matrix products. A thousand calls of L-BFGS would
take minutes. Legend: K draws, P points, G grid cells.
"""

from __future__ import annotations

import numpy as np

from pretrain.scaling.huber_fit import FEWEST_POINTS, SMALLEST_TERM, ParametricFit, uncenter
from pretrain.scaling.law import log_terms
from pretrain.scaling.points import Array, Points

COARSE_GRID = np.geomspace(0.03, 1.5, 16)
MOST_STEPS = 300
RELATIVE_GAIN = (
    1e-7  # a draw is done when three steps in a row gain less than this part of its objective
)
DRAWS_AT_ONCE = 250  # keeps the arrays of one step within the processor's cache


def fit_draws(
    n_P: Array, d_P: Array, l_KP: Array, weight_KP: Array, delta: float, start: Array | None = None
) -> Array:
    """The laws theta [K, 5] that fit ln losses l_KP (K or 1 rows) under the points' weights, row by
    row.

    Each draw starts from its own variable projection and from `start` (the fit of all points), and
    keeps the better end: draws that share one start understate how far apart the minima of
    different draws lie.
    """
    center = np.array([n_P.mean(), d_P.mean()])
    n_P, d_P = n_P - center[0], d_P - center[1]
    num_draws = len(weight_KP)
    l_KP = np.broadcast_to(l_KP, (num_draws, len(n_P)))
    theta = np.empty((num_draws, 5))
    for first in range(0, num_draws, DRAWS_AT_ONCE):
        rows = slice(first, first + DRAWS_AT_ONCE)
        own, own_objective = _descend(
            project_draws(n_P, d_P, l_KP[rows], weight_KP[rows]),
            n_P,
            d_P,
            l_KP[rows],
            weight_KP[rows],
            delta,
        )
        # The draw's own projection finds its basin, the common start the basin of the full fit.
        if start is not None:
            common = start - np.array([0, start[3] * center[0], start[4] * center[1], 0, 0])
            other, other_objective = _descend(
                np.tile(common, (len(own), 1)), n_P, d_P, l_KP[rows], weight_KP[rows], delta
            )
            own = np.where((other_objective < own_objective)[:, None], other, own)
        theta[rows] = own
    return uncenter(theta, center)


def project_draws(n_P: Array, d_P: Array, l_KP: Array, weight_KP: Array) -> Array:
    """Variable projection of every draw on a coarse (alpha, beta) grid, by normal equations."""
    alpha_G, beta_G = (grid.ravel() for grid in np.meshgrid(COARSE_GRID, COARSE_GRID))
    terms_3GP = np.stack(
        [
            np.ones((len(alpha_G), len(n_P))),
            np.exp(-np.outer(alpha_G, n_P)),
            np.exp(-np.outer(beta_G, d_P)),
        ]
    )
    relative_KP = weight_KP * np.exp(-2 * l_KP)
    gram = np.empty((len(weight_KP), len(alpha_G), 3, 3))
    for i in range(3):
        for j in range(i, 3):
            gram[:, :, i, j] = gram[:, :, j, i] = relative_KP @ (terms_3GP[i] * terms_3GP[j]).T
    target = np.stack([(weight_KP * np.exp(-l_KP)) @ terms.T for terms in terms_3GP], axis=-1)
    coefficients, gain = _best_nonnegative(gram, target)
    best_K = gain.argmax(axis=1)
    chosen = coefficients[np.arange(len(best_K)), best_K]
    floor_K1 = SMALLEST_TERM * np.exp(l_KP.mean(axis=1, keepdims=True))
    return np.column_stack([np.log(np.maximum(chosen, floor_K1)), alpha_G[best_K], beta_G[best_K]])


def _best_nonnegative(gram: Array, target: Array) -> tuple[Array, Array]:
    """Return (coefficients, gain) of the best of the seven sets of unknowns that may be nonzero."""
    best = np.zeros(target.shape)
    best_gain = np.zeros(target.shape[:-1])
    for chosen in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        part = gram[..., np.ix_(chosen, chosen)[0], np.ix_(chosen, chosen)[1]]
        ridge = (
            1e-12
            * np.eye(len(chosen))
            * part.diagonal(axis1=-2, axis2=-1).max(axis=-1)[..., None, None]
        )
        solution = np.linalg.solve(part + ridge, target[..., chosen, None])[..., 0]
        gain = (solution * target[..., chosen]).sum(axis=-1)
        better = (solution >= 0).all(axis=-1) & (gain > best_gain)
        full = np.zeros(target.shape)
        full[..., chosen] = solution
        best = np.where(better[..., None], full, best)
        best_gain = np.where(better, gain, best_gain)
    return best, best_gain


def _descend(
    theta: Array, n_P: Array, d_P: Array, l_KP: Array, weight_KP: Array, delta: float
) -> tuple[Array, Array]:
    """Each row of theta at a minimum of its weighted sum of Huber, and the sums there."""
    theta = theta.copy()
    damping = np.full(len(theta), 1e-3)
    objective, gradient, curvature = _model(theta, n_P, d_P, l_KP, weight_KP, delta)
    quiet = np.zeros(len(theta), int)
    for _ in range(MOST_STEPS):
        busy = np.flatnonzero(quiet < 3)
        if not len(busy):
            break
        diagonal = curvature[busy].diagonal(axis1=1, axis2=2)
        scale = np.maximum(diagonal, 1e-9 * diagonal.max(axis=1, keepdims=True) + 1e-300)
        damped = curvature[busy] + damping[busy, None, None] * np.eye(5) * scale[:, None, :]
        # Marquardt's scaling by the diagonal: the five numbers differ in curvature by many decades.
        step = -np.linalg.solve(damped, gradient[busy][..., None])[..., 0]
        candidate = theta[busy] + np.clip(step, -2.0, 2.0)
        value, new_gradient, new_curvature = _model(
            candidate, n_P, d_P, l_KP[busy], weight_KP[busy], delta
        )
        better = value < objective[busy]
        gained = objective[busy] - value
        quiet[busy] = np.where(
            better & (gained > RELATIVE_GAIN * objective[busy]), 0, quiet[busy] + 1
        )
        damping[busy] = np.clip(np.where(better, damping[busy] / 4, damping[busy] * 5), 1e-9, 1e9)
        won = busy[better]
        theta[won], objective[won] = candidate[better], value[better]
        gradient[won], curvature[won] = new_gradient[better], new_curvature[better]
    return theta, objective


def _model(
    theta: Array, n_P: Array, d_P: Array, l_KP: Array, weight_KP: Array, delta: float
) -> tuple[Array, Array, Array]:
    """Weighted sums of Huber [K], their gradients [K, 5] and Gauss-Newton curvatures [K, 5, 5]."""
    terms = log_terms(theta, n_P, d_P)
    peak = terms.max(axis=1)
    shares = np.exp(terms - peak[:, None])
    total = shares.sum(axis=1)
    shares /= total[:, None]
    residual = peak + np.log(total) - l_KP
    size = np.abs(residual)
    value = np.where(size <= delta, 0.5 * residual**2, delta * (size - 0.5 * delta))
    weight = weight_KP * np.minimum(1.0, delta / np.maximum(size, 1e-300))
    jacobian = np.concatenate([shares, -shares[:, 1:2] * n_P, -shares[:, 2:3] * d_P], axis=1)
    weighted = jacobian * weight[:, None]
    return (
        (weight_KP * value).sum(axis=1),
        (weighted @ residual[..., None])[..., 0],
        weighted @ jacobian.transpose(0, 2, 1),
    )


MOST_REDRAWS = 1000


def parametric_draws(
    points: Points, fit: ParametricFit, rng: np.random.Generator, num_draws: int
) -> Array:
    """The laws theta [K, 5] of resamples of these runs. Coverage: docs/scaling.md, "Fit"."""
    weight_KP = pair_weights(len(points), rng, num_draws)
    n_P, d_P, l_P = (
        np.log(values) for values in (points.parameters_P, points.tokens_P, points.loss_P)
    )
    return fit_draws(n_P, d_P, l_P[None], weight_KP, fit.delta, start=fit.law.theta)


def pair_weights(count: int, rng: np.random.Generator, num_draws: int) -> Array:
    """How often each run is in each draw; draws with too few distinct runs are repeated."""
    weight_KP = rng.multinomial(count, np.full(count, 1 / count), size=num_draws)
    for _ in range(MOST_REDRAWS):
        poor_K = (weight_KP > 0).sum(axis=1) < min(FEWEST_POINTS, count)
        if not poor_K.any():
            break
        weight_KP[poor_K] = rng.multinomial(
            count, np.full(count, 1 / count), size=int(poor_K.sum())
        )
    return weight_KP.astype(float)
