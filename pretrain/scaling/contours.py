"""Equal losses of approach 3's law over size and data, as figure 4 of Hoffmann et al. 2022.

Legend: X tokens and Y sizes of a grid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pretrain.reporting.charts import Palette, canvas, legend_above, log_amount_ticks
from pretrain.scaling.charts import APPROACH_COLORS, FLOPS, budget_styles
from pretrain.scaling.checks import beyond
from pretrain.scaling.fit import Fit
from pretrain.scaling.frontier import law_of
from pretrain.scaling.points import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = 80
MARGIN = 1.6  # beyond the runs and the optimum
LEVELS, BELOW = 11, 30.0  # contours, from the optimum at so many times fewer FLOPs than any run's
FEWEST_DECIMALS = 2


def equal_losses(fit: Fit, palette: Palette) -> Figure:
    """Contours of L(N, D), the runs, lines of equal FLOPs and the compute-optimal line."""
    figure, axes = canvas(palette, 4.6, "training tokens D", "parameters N")
    law = fit.approach("parametric")
    assert law
    points, line = fit.points, law_of(law.line)
    low, high = points.flops_P.min() / BELOW, beyond(float(points.flops_P.max()))[0]
    c_X = np.log(np.geomspace(low, high, GRID))
    n_X = line.log_parameters(c_X)
    d_X = line.flops_law.log_tokens(c_X, n_X)
    held = [item.tokens for item in fit.holdouts], [item.parameters for item in fit.holdouts]
    token_X, size_Y = (
        np.geomspace(values_P.min() / MARGIN, MARGIN * max(*values_P, *others), GRID)
        for values_P, others in (
            (points.tokens_P, [*held[0], np.exp(d_X[-1])]),
            (points.parameters_P, [*held[1], np.exp(n_X[-1])]),
        )
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(token_X[0], token_X[-1])
    axes.set_ylim(size_Y[0], size_Y[-1])
    levels = line.loss(np.log(np.geomspace(low, high, LEVELS)))
    _contours(axes, fit, palette, (token_X, size_Y), levels)
    for budget, style in budget_styles(points.budgets).items():
        tokens_Y = np.exp(line.flops_law.log_tokens(np.log(budget), np.log(size_Y)))
        axes.plot(tokens_Y, size_Y, ":", color=style["color"], linewidth=0.9)
        mine = points.budget_P == budget
        axes.plot(points.tokens_P[mine], points.parameters_P[mine], linestyle="", **style)
    color = APPROACH_COLORS["parametric"]
    label = "compute-optimal"
    axes.plot(np.exp(d_X), np.exp(n_X), color=color, linewidth=1.8, label=label)
    if fit.holdouts:
        hollow = {"color": palette.ink, "markerfacecolor": "none", "markersize": 5}
        axes.plot(*held, "D", label="run held out", **hollow)
    log_amount_ticks(axes.xaxis)
    log_amount_ticks(axes.yaxis)
    legend_above(figure, axes, palette, f"runs and dotted lines: {FLOPS}", most_columns=4)
    return figure


def _contours(
    axes: Axes, fit: Fit, palette: Palette, grid: tuple[Array, Array], levels: Array
) -> None:
    assert fit.estimates.parametric
    token_X, size_Y = grid
    loss_YX = fit.estimates.parametric.law.loss(*np.meshgrid(size_Y, token_X, indexing="ij"))
    decimals = FEWEST_DECIMALS
    while len(rounded := np.unique(np.round(levels, decimals))) < len(levels) and decimals < 5:
        decimals += 1
    drawn = axes.contour(
        token_X, size_Y, loss_YX, levels=rounded, colors=palette.faint, linewidths=0.8
    )
    axes.clabel(drawn, fmt=f"%.{decimals}f", fontsize=7.5, colors=palette.ink)
