"""Charts of resampled laws: how well the runs determine the law and the optimum.

Legend: K laws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.reporting.charts import (
    SMALL,
    Palette,
    canvas,
    legend,
    legend_above,
    log_amount_ticks,
    plain_ticks,
)
from pretrain.scaling.charts import APPROACH_COLORS, APPROACH_MARKERS, LOSS
from pretrain.scaling.checks import beyond
from pretrain.scaling.fit import Fit
from pretrain.scaling.frontier import law_of
from pretrain.scaling.points import Array
from pretrain.terminal.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN_PERCENTILES = (1.0, 99.0)  # that the axes of a cloud hold, with a margin
MOST_DOTS = 1500
CLOUD_MARGIN = 0.25


def exponent_cloud(fit: Fit, palette: Palette) -> Figure:
    """The resamples' alpha and beta: how well the runs determine the two exponents."""
    labels = "alpha, exponent of the size N", "beta, exponent of the data D"
    figure, axes = canvas(palette, 3.6, *labels)
    law = fit.approach("parametric")
    assert law
    assert law.region
    alpha_K, beta_K = law_of(law.region).theta[:, 3:].T
    _cloud(axes, alpha_K, beta_K, "parametric", "fits of resampled budgets")
    alpha, beta = law_of(law.line).theta[3:]
    found = [alpha], [beta]
    axes.plot(*found, "*", color=palette.ink, markersize=10, label="fit of all runs")
    outside = _keep_to_the_middle(axes, alpha_K, beta_K)
    legend(axes, palette, title=outside)
    return figure


def optimum_cloud(fit: Fit, palette: Palette) -> Figure:
    """The optimum beyond the largest budget: size against loss, by every approach."""
    flops, _ = beyond(float(fit.points.budgets[-1]))
    log_flops = float(np.log(flops))
    labels = f"optimal parameters N* at {flops:.3g} FLOPs", f"its {LOSS}"
    figure, axes = canvas(palette, 3.6, *labels)
    law = fit.approach("parametric")
    assert law
    assert law.region
    with np.errstate(over="ignore"):  # infinite ones are outside the axes
        size_K = np.exp(law.region.log_parameters(log_flops))
        loss_K = law.region.loss(log_flops)
    _cloud(axes, size_K, loss_K, law.key, f"{law.title}, resampled budgets")
    star: dict[str, Any] = {
        "markeredgecolor": palette.ink,
        "markeredgewidth": 0.8,
        "markersize": 11,
        "zorder": 5,
    }
    axes.plot([], [], "*", color="none", label="fit of all runs", **star)
    for approach in fit.approaches:
        size, loss = np.exp(approach.line.log_parameters(log_flops)), approach.line.loss(log_flops)
        axes.plot([size], [loss], "*", color=APPROACH_COLORS[approach.key], **star)
        number, _, _ = approach.title.partition(" ")
        beside: Any = {"xytext": (5, 4), "textcoords": "offset points", "annotation_clip": True}
        axes.annotate(number, (size, loss), color=palette.ink, fontsize=SMALL, zorder=6, **beside)
    axes.set_xscale("log")
    outside = _keep_to_the_middle(axes, size_K, loss_K)
    log_amount_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    legend_above(figure, axes, palette, outside)
    return figure


def _cloud(axes: Axes, x_K: Array, y_K: Array, key: str, label: str) -> None:
    """The resamples of the approach `key`, in its color and by its marker."""
    every = slice(None, None, max(1, len(x_K) // MOST_DOTS))
    color, marker = APPROACH_COLORS[key], APPROACH_MARKERS[key]
    thin: Any = {"linewidths": 0.8 if marker == "+" else 0}
    axes.scatter(x_K[every], y_K[every], s=9, color=color, marker=marker, alpha=0.35, **thin)
    axes.plot([], [], marker, color=color, markersize=5, label=label)


def _keep_to_the_middle(axes: Axes, x_K: Array, y_K: Array) -> str:
    """Limit the axes to most dots, so that far ones do not compress them; count the others."""
    inside_K = np.isfinite(x_K) & np.isfinite(y_K)
    x_K, y_K, inside_K = x_K[inside_K], y_K[inside_K], np.ones(int(inside_K.sum()), bool)
    count = int(inside_K.sum())
    for values_K, set_limits, is_log in (
        (x_K, axes.set_xlim, axes.get_xscale() == "log"),
        (y_K, axes.set_ylim, axes.get_yscale() == "log"),
    ):
        scaled_K = np.log(values_K) if is_log else values_K
        low, high = np.percentile(scaled_K[np.isfinite(scaled_K)], SHOWN_PERCENTILES)
        margin = CLOUD_MARGIN * max(high - low, 1e-3)
        limits = np.array([low - margin, high + margin])
        inside_K &= (scaled_K >= limits[0]) & (scaled_K <= limits[1])
        set_limits(*(np.exp(limits) if is_log else limits))
    outside = count - int(inside_K.sum())
    return f"{counted(outside, 'dot')} outside the axes" if outside else ""
