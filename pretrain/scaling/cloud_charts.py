"""The pictures of a scaling report that show every draw of the bootstrap. Legend: K draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pretrain.reporting.charts import Palette, canvas, legend, log_amount_ticks, plain_ticks
from pretrain.scaling.agreement import beyond
from pretrain.scaling.charts import APPROACH_COLORS, LOSS
from pretrain.scaling.fit import Fit
from pretrain.scaling.lines import LawLine
from pretrain.scaling.points import Array
from pretrain.terminal.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = (1.0, 99.0)  # percentiles of the draws that the axes hold, with a margin
MARGIN = 0.25


def exponent_cloud(fit: Fit, palette: Palette) -> Figure:
    """The bootstrap's alpha and beta: how well the runs tell the two exponents."""
    figure, axes = canvas(
        palette, 3.6, "alpha, exponent of the size N", "beta, exponent of the data D"
    )
    law = fit.approach("parametric")
    assert law
    assert isinstance(law.line, LawLine)
    assert isinstance(law.draws, LawLine)
    alpha_K, beta_K = law.draws.theta[:, 3], law.draws.theta[:, 4]
    _cloud(
        axes,
        alpha_K,
        beta_K,
        APPROACH_COLORS["parametric"],
        counted(fit.num_draws, "bootstrap draw"),
    )
    axes.plot(
        [law.line.theta[3]],
        [law.line.theta[4]],
        "*",
        color=palette.ink,
        markersize=10,
        label="fit of all runs",
    )
    outside = _keep_to_the_middle(axes, alpha_K, beta_K)
    legend(axes, palette, title=outside)
    return figure


def optimum_cloud(fit: Fit, palette: Palette) -> Figure:
    """The bootstrap's optimum beyond the largest budget: size against loss, by every approach."""
    flops, _ = beyond(float(fit.points.budgets[-1]))
    log_flops = float(np.log(flops))
    figure, axes = canvas(
        palette, 3.6, f"optimal parameters N* at {flops:.3g} FLOPs", f"its {LOSS}"
    )
    clouds = []
    for approach in fit.approaches:
        clouds.append(
            (np.exp(approach.draws.log_parameters(log_flops)), approach.draws.loss(log_flops))
        )
        size_K, loss_K = clouds[-1]
        _cloud(axes, size_K, loss_K, APPROACH_COLORS[approach.key], f"{approach.title}, draws")
    for index, approach in enumerate(fit.approaches):
        size, loss = np.exp(approach.line.log_parameters(log_flops)), approach.line.loss(log_flops)
        axes.plot(
            [size], [loss], "*", color=APPROACH_COLORS[approach.key], markeredgecolor=palette.ink,
            markeredgewidth=0.8, markersize=11, zorder=5, label=None if index else "fit of all runs",
        )  # fmt: skip
    axes.set_xscale("log")
    size_K, loss_K = (np.concatenate(column) for column in zip(*clouds, strict=True))
    outside = _keep_to_the_middle(axes, size_K, loss_K)
    log_amount_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    legend(axes, palette, title=outside)
    return figure


def _cloud(axes: Axes, x_K: Array, y_K: Array, color: str, label: str) -> None:
    axes.scatter(x_K, y_K, s=7, color=color, alpha=0.35, linewidths=0)
    axes.plot([], [], "o", color=color, markersize=4, label=label)


def _keep_to_the_middle(axes: Axes, x_K: Array, y_K: Array) -> str:
    """Axes that hold most draws, so that a few far ones do not press the others together; how many they leave out."""
    inside_K = np.isfinite(x_K) & np.isfinite(y_K)
    count = int(inside_K.sum())
    for values_K, set_limits, is_log in (
        (x_K, axes.set_xlim, axes.get_xscale() == "log"),
        (y_K, axes.set_ylim, axes.get_yscale() == "log"),
    ):
        scaled_K = np.log(values_K) if is_log else values_K
        low, high = np.percentile(scaled_K[np.isfinite(scaled_K)], SHOWN)
        margin = MARGIN * max(high - low, 1e-3)
        limits = np.array([low - margin, high + margin])
        inside_K &= (scaled_K >= limits[0]) & (scaled_K <= limits[1])
        set_limits(*(np.exp(limits) if is_log else limits))
    outside = count - int(inside_K.sum())
    return f"{counted(outside, 'draw')} outside the picture" if outside else ""
