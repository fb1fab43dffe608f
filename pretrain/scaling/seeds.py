"""Runs that differ only by their seed. Legend: P points, M means."""

from __future__ import annotations

import numpy as np

from pretrain.scaling.points import Points


def seed_spread(points: Points) -> float | None:
    """The relative standard deviation of losses over seeds; None if no run was repeated."""
    pairs = np.stack([points.parameters_P, points.tokens_P], axis=1)
    group_P = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    count_M = np.bincount(group_P)
    free = len(points) - len(count_M)
    if not free:
        return None
    log_P = np.log(points.loss_P)
    rest_P = log_P - (np.bincount(group_P, log_P) / count_M)[group_P]
    return float(np.sqrt((rest_P**2).sum() / free))
