"""Approach 1: the lower envelope of loss curves over FLOPs. The size that is lowest at C is N*(C).

Three kinds of curve, the first that the runs allow: training curves of the runs; finished runs of
one size joined over their tokens; else only the lowest run of each budget.
Legend: R curves, G positions on the axis of FLOPs, P points.

Source: Hoffmann et al. 2022, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.frontier import Frontier, fit_frontier
from pretrain.scaling.points import Array, Points

NUM_PLACES = 64
GOOD_WINNERS = 3
NO_INTERVAL = (
    "its sizes come in steps, and which one is lowest is a matter of single runs: neither "
    "resampling them nor a likelihood measures that"
)
KINDS = {
    "curves": "training curves: their losses are those of the text just read, and before its end "
    "a run's learning rate "
    "is still high, which lifts every curve but its last part and biases the sizes",
    "sizes": "finished runs joined by size: between two runs the curve is a straight line in ln "
    "loss over ln C",
    "minimum": "the lowest run of each budget, not a curve: sizes come in steps, and a tie in "
    "noise moves a whole step",
}


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The losses of R curves at G common places; NaN where a curve does not reach."""

    kind: str  # a key of KINDS
    n_R: Array  # ln N
    log_flops_G: Array
    loss_RG: Array


@dataclass(frozen=True, kw_only=True)
class EnvelopeFit:
    """Approach 1's frontier, with the sizes that are lowest somewhere inside the range of sizes."""

    kind: str
    curves: Curves = field(repr=False)
    n_G: Array = field(
        repr=False
    )  # ln N of the lowest curve; NaN where it is the smallest or largest there
    frontier: Frontier
    warnings: tuple[str, ...]


def fit_envelope(points: Points, training: Mapping[str, Array] | None = None) -> EnvelopeFit:
    """The frontier from `training` curves if given (see `training_curves`), else from the finished
    runs.

    Raises DataError when fewer than two sizes are ever the lowest one with a smaller and a larger
    beside it.
    """
    curves = (
        training_curves(training)
        if training
        else _joined_by_size(points) or _budgets_as_places(points)
    )
    n_G, loss_G = _lowest(curves)
    winners = np.unique(n_G[np.isfinite(n_G)])
    if len(winners) < 2:
        raise DataError(
            f"{points.source}: approach 1 needs two sizes that are lowest at some FLOPs with a "
            "smaller and a larger "
            f"on either side, and found {len(winners) or 'none'}; add sizes or budgets"
        )
    warnings = [KINDS[curves.kind]]
    if len(winners) < GOOD_WINNERS:
        warnings.append(f"only {len(winners)} sizes are ever the lowest: the frontier is one step")
    frontier = fit_frontier(curves.log_flops_G, n_G, loss_G)
    return EnvelopeFit(
        kind=curves.kind, curves=curves, n_G=n_G, frontier=frontier, warnings=tuple(warnings)
    )


def training_curves(training: Mapping[str, Array]) -> Curves:
    """Training curves (`run`, `N`, `C`, `loss`) interpolated to common values of ln C."""
    runs = np.unique(training["run"])
    pieces = []
    for run in runs:
        mine = training["run"] == run
        order = np.argsort(training["C"][mine])
        x, y = np.log(training["C"][mine][order]), np.log(training["loss"][mine][order])
        pieces.append((float(np.log(training["N"][mine][0])), x, y))
    return _on_common_places("curves", pieces)


def _joined_by_size(points: Points) -> Curves | None:
    """Each size's finished runs as a curve; None below three sizes or half of the runs."""
    pieces, num_runs = [], 0
    for size in np.unique(points.parameters_P):
        mine = points.take(points.parameters_P == size)
        x = np.unique(mine.flops_P)
        if len(x) >= 2:
            y = [np.log(mine.loss_P[mine.flops_P == flops]).mean() for flops in x]
            pieces.append((float(np.log(size)), np.log(x), np.array(y)))
            num_runs += len(mine)
    return (
        _on_common_places("sizes", pieces)
        if len(pieces) >= 3 and 2 * num_runs >= len(points)
        else None
    )


def _on_common_places(kind: str, pieces: list[tuple[float, Array, Array]]) -> Curves:
    low, high = min(x[0] for _, x, _ in pieces), max(x[-1] for _, x, _ in pieces)
    log_flops_G = np.linspace(low, high, NUM_PLACES)
    loss_RG = [
        np.exp(np.interp(log_flops_G, x, y, left=np.nan, right=np.nan)) for _, x, y in pieces
    ]
    return Curves(
        kind=kind,
        n_R=np.array([n for n, _, _ in pieces]),
        log_flops_G=log_flops_G,
        loss_RG=np.array(loss_RG),
    )


def _budgets_as_places(points: Points) -> Curves:
    budgets = points.budgets
    loss_RG = np.where(points.budget_P[:, None] == budgets, points.loss_P[:, None], np.nan)
    return Curves(
        kind="minimum",
        n_R=np.log(points.parameters_P),
        log_flops_G=np.log(budgets),
        loss_RG=loss_RG,
    )


def _lowest(curves: Curves) -> tuple[Array, Array]:
    """ln N and loss [G] of the lowest curve; NaN if it is the smallest or largest there."""
    # A winner at the edge of the window of sizes proves nothing: a size outside might be lower.
    # Only a size that beats a smaller and a larger curve at the same C is an optimum.
    reach_RG = np.isfinite(curves.loss_RG)
    n_RG = np.where(reach_RG, curves.n_R[:, None], np.nan)
    none_G = ~reach_RG.any(axis=0)
    smallest_G, largest_G = (
        np.where(none_G, np.nan, pick(np.where(reach_RG, n_RG, fill), axis=0))
        for pick, fill in ((np.min, np.inf), (np.max, -np.inf))
    )
    loss_RG = np.where(reach_RG, curves.loss_RG, np.inf)
    loss_G, n_G = loss_RG.min(axis=0), curves.n_R[loss_RG.argmin(axis=0)]
    inside_G = np.isfinite(loss_G) & (n_G > smallest_G) & (n_G < largest_G)
    return np.where(inside_G, n_G, np.nan), np.where(inside_G, loss_G, np.nan)
