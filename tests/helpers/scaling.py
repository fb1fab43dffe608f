"""Runs that follow a known law, for tests that must know the answer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.scaling.law import FlopsLaw, Law, log_optimum
from pretrain.scaling.table import Array, Columns, Points, grouped_budgets, read_points

PUBLISHED_DATA = Path(__file__).parents[1] / "data" / "scaling"
HOFFMANN = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
BESIROGLU = Law(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
CS336 = Law(E=2.69, A=1606.4, B=3210.7, alpha=0.34, beta=0.36)
# Of audio and text (SODA, arXiv 2602.16687): the most unequal exponents that are published.
SODA = Law(E=3.169, A=215886, B=4750, alpha=0.684, beta=0.439)
SIX_N = FlopsLaw()


def make_points(
    parameters: Sequence[float] | Array,
    tokens: Sequence[float] | Array,
    loss: Sequence[float] | Array,
    *,
    flops: Sequence[float] | Array | None = None,
    budget: Sequence[float] | Array | None = None,
    names: Sequence[str] = (),
    source: str = "points",
) -> Points:
    """Points from arrays; C defaults to 6 N D and budgets to groups of about equal C."""
    columns = (np.asarray(column, float) for column in (parameters, tokens, loss))
    num_parameters_P, tokens_P, loss_P = columns
    flops_P = 6 * num_parameters_P * tokens_P if flops is None else np.asarray(flops, float)
    count = len(loss_P)
    return Points(
        names=tuple(names) or tuple(f"point {index}" for index in range(count)),
        parameters_P=num_parameters_P,
        tokens_P=tokens_P,
        flops_P=flops_P,
        loss_P=loss_P,
        budget_P=grouped_budgets(flops_P) if budget is None else np.asarray(budget, float),
        progress_P=np.ones(count),
        holdout_P=np.zeros(count, bool),
        source=source,
    )


def simulated(
    law: Law = HOFFMANN,
    *,
    budgets: tuple[float, float, int] = (1e18, 1e20, 6),
    num_sizes: int = 8,
    spread: float = 4.0,
    centers: Sequence[float] | Array = (1.0,),
    noise: float = 0.0,
    seed: int = 0,
    flops_law: FlopsLaw = SIX_N,
) -> Points:
    """`num_sizes` sizes from 1/spread to spread times the center at each budget; `centers`, one or
    one per budget, are times the optimum; `noise` is relative, of the loss.
    """
    low, high, count = budgets
    budget_P = np.repeat(np.geomspace(low, high, count), num_sizes)
    factor_P = np.outer(
        np.broadcast_to(centers, count), np.geomspace(1 / spread, spread, num_sizes)
    )
    n_P = log_optimum(law.theta, np.log(budget_P), flops_law)[0] + np.log(factor_P.ravel())
    size_P, tokens_P = np.exp(n_P), np.exp(flops_law.log_tokens(np.log(budget_P), n_P))
    noise_P = noise * np.random.default_rng(seed).standard_normal(len(n_P))
    loss_P = law.loss(size_P, tokens_P) * np.exp(noise_P)
    more = {"flops": budget_P, "budget": budget_P, "source": "simulation"}
    return make_points(size_P, tokens_P, loss_P, **more)


def cs336() -> Points:
    """The 72 noise-free IsoFLOP points of Stanford's CS336."""
    columns = Columns(parameters="parameters", flops="compute_budget", loss="final_loss")
    return read_points(PUBLISHED_DATA / "cs336.csv", columns)


def write_points(path: Path, points: Points) -> Path:
    """A table of the runs as others publish it: sizes, tokens, FLOPs and losses."""
    columns = (points.parameters_P, points.tokens_P, points.flops_P, points.loss_P)
    lines = [",".join(map(repr, row)) for row in np.stack(columns, 1).tolist()]
    path.write_text("\n".join(["N,D,C,loss", *lines, ""]))
    return path
