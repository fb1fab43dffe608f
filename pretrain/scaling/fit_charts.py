"""The charts of a fit: the valleys of its budgets, the frontier, sizes, errors. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.reporting.charts import (
    FAINT,
    INK,
    SERIES,
    canvas,
    legend_above,
    log_amount_ticks,
    log_ticks,
    plain_ticks,
    spread_colors,
    spread_markers,
)
from pretrain.scaling.fit import LIMITS, Fit
from pretrain.scaling.frontier import Approach
from pretrain.scaling.intervals import LEVEL, Interval
from pretrain.scaling.table import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS: dict[str, str] = dict(
    zip(("parametric", "lowest", "isoflop", "tied"), SERIES, strict=False)
)
# Told apart in grey, too. The line at the largest run is dashed.
LINES: dict[str, Any] = {
    "parametric": "solid",
    "lowest": (0, (1, 1)),
    "isoflop": (0, (4, 1.3, 1, 1.3)),
    "tied": (0, (7, 2)),
}
LOSS = "loss (nats per token)"
FLOPS = "training FLOPs C"
BANDS = f"by each law, in a band of its {LEVEL}% interval"
MOST_LABELS = 12  # of budgets in a legend
BAND_POINTS = 60
RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def valleys_chart(fit: Fit) -> Figure:
    """The runs of each budget over their size, with approach 2's parabolas and vertices."""
    figure, axes = canvas(4.4, "parameters N", LOSS)
    points, parabolas = fit.points, {valley.budget: valley for valley in fit.valleys}
    for budget, style in budget_styles(points.budgets).items():
        mine = points.budget_P == budget
        axes.plot(points.parameters_P[mine], points.loss_P[mine], linestyle="", **style)
        valley = parabolas.get(budget)
        if valley and np.isfinite(valley.parameters):
            n_X = np.linspace(np.log(valley.smallest), np.log(valley.largest), BAND_POINTS)
            curve_X = valley.loss + valley.bend / 2 * (n_X - np.log(valley.parameters)) ** 2
            axes.plot(np.exp(n_X), curve_X, color=style["color"], linewidth=1.3)
        if valley and valley.is_used:
            lowest = [valley.parameters], [valley.loss]
            axes.plot(*lowest, "*", color=INK, markersize=9, zorder=5)
    if fit.valleys:
        axes.plot([], [], "*", color=INK, markersize=9, label="lowest point")
    axes.set_xscale("log")
    log_amount_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    legend_above(figure, axes, f"budget, {FLOPS}", most_columns=4)
    return figure


def budget_styles(budgets: Array) -> dict[float, dict[str, Any]]:
    """Color, marker and label of each budget; of many budgets only some have a label."""
    count, styles = len(budgets), {}
    looks = zip(budgets.tolist(), spread_colors(count), spread_markers(count), strict=True)
    for index, (budget, color, marker) in enumerate(looks):
        label = None if index % -(-count // MOST_LABELS) else f"{budget:.3g}"
        styles[budget] = {"color": color, "marker": marker, "markersize": 4.5, "label": label}
    return styles


def frontier_chart(fit: Fit) -> Figure:
    """Every run's loss over its FLOPs, and the least loss by each approach, with bands."""
    figure, axes = canvas(4.2, FLOPS, LOSS)
    runs = fit.points.flops_P, fit.points.loss_P
    axes.plot(*runs, "o", color=FAINT, markersize=3, alpha=0.7, label="runs")
    _lines_with_bands(axes, fit, lambda approach, flops: fit.optimum(approach, flops)[2])
    if fit.holdouts:
        _held_out(axes, fit)
    plain_ticks(axes.yaxis)
    legend_above(figure, axes, f"least loss {BANDS}")
    return figure


def residuals_chart(fit: Fit) -> Figure:
    """The relative error of the first law for each run that it predicts, over FLOPs, by D/N."""
    from matplotlib.colors import LogNorm

    figure, axes = canvas(3.4, FLOPS, "(predicted - measured) / measured loss, %")
    assert fit.drawn.fit
    points = fit.points.take(np.isfinite(fit.drawn.fit.losses(fit.points)))
    error_P = 100 * (fit.drawn.fit.losses(points) / points.loss_P - 1)
    ratio_P = points.tokens_P / points.parameters_P
    look: Any = {"cmap": "viridis", "norm": LogNorm(ratio_P.min(), 1.01 * ratio_P.max())}
    shown = axes.scatter(points.flops_P, error_P, c=ratio_P, s=18, linewidths=0, **look)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.set_xscale("log")
    log_ticks(axes.xaxis, power_of_ten)
    bar = figure.colorbar(shown, ax=axes, pad=0.02, aspect=30)
    bar.set_label("tokens per parameter D/N")
    log_amount_ticks(bar.ax.yaxis)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def power_of_ten(value: float) -> str:
    """FLOPs as 10 to the 11th or 2 times that, with a raised exponent."""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    digits = f"{value / 10.0**exponent:.3g}"
    power = "10" + str(exponent).translate(RAISED)
    return power if digits == "1" else f"{digits} \N{MULTIPLICATION SIGN} {power}"


def sizes_chart(fit: Fit) -> Figure:
    """N* over C by each law, with bands and the lowest points of approach 2's parabolas."""
    figure, axes = canvas(4.2, FLOPS, "optimal parameters N*")
    _lines_with_bands(axes, fit, lambda approach, flops: fit.optimum(approach, flops)[0])
    if used := [valley for valley in fit.valleys if valley.is_used]:
        lowest = [valley.budget for valley in used], [valley.parameters for valley in used]
        axes.plot(*lowest, "*", color=INK, markersize=8, label="lowest point of a parabola")
    log_amount_ticks(axes.yaxis)
    legend_above(figure, axes, f"optimum {BANDS}")
    return figure


def _lines_with_bands(
    axes: Axes, fit: Fit, value_at: Callable[[Approach, float], Interval]
) -> None:
    """A line and a band per approach, from the smallest run to beyond the largest budget."""
    low, high = (
        np.log(fit.points.flops_P.min()),
        np.log(LIMITS.beyond * float(fit.points.flops_P.max())),
    )
    flops_X = np.exp(np.linspace(low, high, BAND_POINTS))
    for approach in fit.approaches:
        items = [value_at(approach, flops) for flops in flops_X.tolist()]
        color, line = COLORS[approach.key], [item.value for item in items]
        look: Any = {"linestyle": LINES[approach.key], "linewidth": 1.5}
        axes.plot(flops_X, line, color=color, label=approach.title, **look)
        lows, highs = [item.low for item in items], [item.high for item in items]
        axes.fill_between(flops_X, lows, highs, color=color, alpha=0.25, linewidth=0)
    dashed = {"linewidth": 0.8, "linestyle": (0, (4, 3)), "label": "largest run fitted"}
    axes.axvline(fit.points.flops_P.max(), color=FAINT, **dashed)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis, power_of_ten)


def _held_out(axes: Axes, fit: Fit) -> None:
    """Draw runs that were held out, and what the law of N and D predicts for each."""
    flops = [item.flops for item in fit.holdouts]
    predicted = [item.predicted for item in fit.holdouts]
    color = COLORS[fit.law.key] if fit.law else INK
    ends = np.array([(interval.low, interval.high) for interval in predicted])
    bounded = (np.isfinite(ends) & (ends > 0)).all(axis=1)
    axes.vlines(np.array(flops)[bounded], *ends[bounded].T, color=color, linewidth=1.0)
    dashes = {"color": color, "markersize": 13, "markeredgewidth": 1.8, "zorder": 5}
    label = "prediction for that run"
    measured = [item.measured for item in fit.holdouts]
    axes.plot(flops, measured, "D", color=INK, markersize=4, label="run held out", zorder=6)
    axes.plot(flops, [interval.value for interval in predicted], "_", label=label, **dashes)
