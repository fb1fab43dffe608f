"""Variable projection: for given exponents, E + A/N^alpha + B/D^beta is linear in E, A and B.

Legend: P points, G cells of the grid of exponents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pretrain.scaling.points import Array

EXPONENT_GRID = np.geomspace(0.02, 1.6, 60)
# of the mean loss: where the linear problem finds a term to be 0, its logarithm starts from here
SMALLEST_TERM = 1e-6
RIDGE = 1e-13


@dataclass(frozen=True)
class Normal:
    """The normal equations of E, A and B on a grid of exponents."""

    gram: Array  # [G, 3, 3]
    target: Array  # [G, 3]
    squares: float  # of the losses


def normal_equations(
    n_P: Array, d_P: Array, loss_P: Array, weight_P: Array, alpha: Array, beta: Array
) -> Normal:
    """Sums over the runs for every pair of exponents; products of two axes cost one product of
    matrices, so a hundred thousand runs take a second.
    """
    size, data = np.exp(-np.outer(alpha, n_P)), np.exp(-np.outer(beta, d_P))
    gram = np.empty((len(alpha), len(beta), 3, 3))
    target = np.empty((len(alpha), len(beta), 3))
    gram[..., 0, 0] = weight_P.sum()
    gram[..., 0, 1] = gram[..., 1, 0] = (size @ weight_P)[:, None]
    gram[..., 0, 2] = gram[..., 2, 0] = data @ weight_P
    gram[..., 1, 1] = (size**2 @ weight_P)[:, None]
    gram[..., 2, 2] = data**2 @ weight_P
    gram[..., 1, 2] = gram[..., 2, 1] = (size * weight_P) @ data.T
    target[..., 0] = weight_P @ loss_P
    target[..., 1] = (size @ (weight_P * loss_P))[:, None]
    target[..., 2] = data @ (weight_P * loss_P)
    squares = float((weight_P * loss_P**2).sum())
    return Normal(gram.reshape(-1, 3, 3), target.reshape(-1, 3), squares)


def project(n_P: Array, d_P: Array, loss_P: Array) -> tuple[Array, bool]:
    """Return the law of least squared relative error on the grid, and if it is on the edge."""
    grid = EXPONENT_GRID
    # Dividing each row by its loss makes least squares relative, close to the objective in ln loss.
    normal = normal_equations(n_P, d_P, loss_P, loss_P**-2.0, grid, grid)
    coefficients, gain = best_nonnegative(normal.gram, normal.target)
    best = int(gain.argmax())
    alpha, beta = grid[best // len(grid)], grid[best % len(grid)]
    logs = np.log(np.maximum(coefficients[best], SMALLEST_TERM * loss_P.mean()))
    return np.array([*logs, alpha, beta]), bool({alpha, beta} & {grid[0], grid[-1]})


def best_nonnegative(gram: Array, target: Array) -> tuple[Array, Array]:
    """Coefficients >= 0 of least squares for every cell [G, J], and by how much they lower it."""
    count = target.shape[-1]
    best, best_gain = np.zeros(target.shape), np.zeros(target.shape[:-1])
    for bits in range(1, 2**count):
        chosen = [index for index in range(count) if bits >> index & 1]
        part = gram[..., np.ix_(chosen, chosen)[0], np.ix_(chosen, chosen)[1]]
        largest = part.diagonal(axis1=-2, axis2=-1).max(axis=-1)
        solution = np.linalg.solve(
            part + RIDGE * np.eye(len(chosen)) * largest[..., None, None], target[..., chosen, None]
        )[..., 0]
        gain = (solution * target[..., chosen]).sum(axis=-1)
        better = (solution >= 0).all(axis=-1) & (gain > best_gain)
        full = np.zeros(target.shape)
        full[..., chosen] = solution
        best = np.where(better[..., None], full, best)
        best_gain = np.where(better, gain, best_gain)
    return best, best_gain
