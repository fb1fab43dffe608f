"""Least-squares parabolas through a few losses, and the draws that say how far to trust them.

Abscissas are given in units of half the grid, so that it runs from -1 to 1 (`frame`): then the
parabola's coefficients are well conditioned. Legend: K draws, S places on the grid.
"""

from __future__ import annotations

import numpy as np

from pretrain.scaling.points import Array

FARTHEST_VERTEX = 2.0  # half widths of the grid from its middle; beyond, a vertex is extrapolation


def frame(x_S: Array) -> tuple[float, float]:
    """The middle and the half width of the grid."""
    return float((x_S.max() + x_S.min()) / 2), float(max(np.ptp(x_S) / 2, 1e-12))


def parabolas(x_S: Array, loss_KS: Array) -> tuple[Array, Array, Array]:
    """Vertex, loss there and second derivative of each row's least-squares parabola."""
    c0, c1, c2 = np.linalg.pinv(x_S[:, None] ** np.arange(3)) @ loss_KS.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return -c1 / (2 * c2), c0 - c1**2 / (4 * c2), 2 * c2


def fitted_and_residuals(x_S: Array, loss_S: Array) -> tuple[Array, Array]:
    """The parabola at the grid's places, and relative residuals as large as for places left out."""
    terms_S3 = x_S[:, None] ** np.arange(3)
    hat_SS = terms_S3 @ np.linalg.pinv(terms_S3)
    fitted_S = hat_SS @ loss_S
    free_S = np.maximum(1 - hat_SS.diagonal(), 1e-6)  # three places leave no residual at all
    return fitted_S, np.where(free_S > 1e-5, (loss_S / fitted_S - 1) / np.sqrt(free_S), 0.0)


def widening(degrees_of_freedom: int) -> float:
    """How much wider Student's t is than the normal at 95%; 1 without residuals."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, 0.975) / 1.959964) if degrees_of_freedom > 0 else 1.0


def vertex_draws(
    x_S: Array, fitted_S: Array, pool: Array, rng: np.random.Generator, num_draws: int
) -> tuple[Array, Array]:
    """Vertex and loss there of parabolas through the fitted losses plus residuals of the pool.

    NaN for a draw without a lowest place, or with one far outside of the grid.
    """
    loss_KS = fitted_S * (1 + rng.choice(pool, size=(num_draws, len(x_S))))
    vertex_K, bottom_K, bend_K = parabolas(x_S, loss_KS)
    good_K = (bend_K > 0) & (np.abs(vertex_K) < FARTHEST_VERTEX)
    return np.where(good_K, vertex_K, np.nan), np.where(good_K, bottom_K, np.nan)


def parabola_through(x_S: Array, loss_S: Array, at_X: Array) -> Array:
    """The least-squares parabola's losses at other places."""
    center, half = frame(x_S)
    coefficients = np.linalg.pinv(((x_S - center) / half)[:, None] ** np.arange(3)) @ loss_S
    return ((at_X - center) / half)[:, None] ** np.arange(3) @ coefficients
