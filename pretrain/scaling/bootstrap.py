"""Approach 3's bootstrap: pairs (whole runs) drawn with replacement, all draws fitted at once.

Legend: K draws, P points.
"""

from __future__ import annotations

import numpy as np

from pretrain.scaling.parametric import FEWEST_POINTS, ParametricFit
from pretrain.scaling.parametric_draws import fit_draws
from pretrain.scaling.points import Array, Points

MOST_REDRAWS = 1000


def parametric_draws(
    points: Points, fit: ParametricFit, rng: np.random.Generator, num_draws: int
) -> Array:
    """The laws theta [K, 5] of `num_draws` resamples of these runs. Covers 90-97 % at a nominal 95 % (simulated)."""
    weight_KP = pair_weights(len(points), rng, num_draws)
    n_P, d_P, l_P = (
        np.log(values) for values in (points.parameters_P, points.tokens_P, points.loss_P)
    )
    return fit_draws(n_P, d_P, l_P[None], weight_KP, fit.delta, start=fit.law.theta)


def pair_weights(count: int, rng: np.random.Generator, num_draws: int) -> Array:
    """How often each of `count` runs is in each draw; a draw of too few distinct runs to fit is drawn again."""
    weight_KP = rng.multinomial(count, np.full(count, 1 / count), size=num_draws)
    for _ in range(MOST_REDRAWS):
        poor_K = (weight_KP > 0).sum(axis=1) < min(FEWEST_POINTS, count)
        if not poor_K.any():
            break
        weight_KP[poor_K] = rng.multinomial(
            count, np.full(count, 1 / count), size=int(poor_K.sum())
        )
    return weight_KP.astype(float)
