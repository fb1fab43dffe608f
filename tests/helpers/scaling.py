"""Runs that follow a known law, for tests that must know the answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pretrain.scaling.law import FlopsLaw, Law, log_optimum
from pretrain.scaling.point_files import Columns, read_points
from pretrain.scaling.points import Points, make_points

HOFFMANN = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
SIX_N = FlopsLaw()


def simulated(
    law: Law = HOFFMANN,
    *,
    budgets: tuple[float, float, int] = (1e18, 1e20, 6),
    num_sizes: int = 8,
    spread: float = 4.0,
    noise: float = 0.0,
    seed: int = 0,
    flops_law: FlopsLaw = SIX_N,
) -> Points:
    """`num_sizes` sizes from 1/spread to spread times the optimum at each budget; `noise` is relative, of the loss."""
    low, high, count = budgets
    budget_P = np.repeat(np.geomspace(low, high, count), num_sizes)
    factor_P = np.tile(np.geomspace(1 / spread, spread, num_sizes), count)
    n_P = log_optimum(law.theta, np.log(budget_P), flops_law)[0] + np.log(factor_P)
    size_P, tokens_P = np.exp(n_P), np.exp(flops_law.log_tokens(np.log(budget_P), n_P))
    loss_P = law.loss(size_P, tokens_P) * np.exp(
        noise * np.random.default_rng(seed).standard_normal(len(n_P))
    )
    return make_points(
        size_P, tokens_P, loss_P, flops=budget_P, budget=budget_P, source="simulation"
    )


def cs336(path: Path) -> Points:
    """The 72 noise-free IsoFLOP points of Stanford's CS336."""
    return read_points(
        path, Columns(parameters="parameters", flops="compute_budget", loss="final_loss")
    )
