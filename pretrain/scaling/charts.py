"""The charts of a scaling report, each drawn in the palette of the page or of print.

Legend: K curves of a region, P points, X positions on an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pretrain.reporting.charts import (
    SERIES,
    Palette,
    canvas,
    legend,
    legend_above,
    log_amount_ticks,
    log_ticks,
    plain_ticks,
    spread_colors,
)
from pretrain.scaling.checks import beyond, relative_error
from pretrain.scaling.fit import Fit
from pretrain.scaling.frontier import law_of
from pretrain.scaling.intervals import LEVEL, Interval
from pretrain.scaling.isoflop import Valley
from pretrain.scaling.points import Array
from pretrain.terminal.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

APPROACH_COLORS = {"envelope": SERIES[1], "isoflop": SERIES[2], "parametric": SERIES[0]}
LOSS = "loss (nats per token)"
FLOPS = "training FLOPs C"
BANDS = f"by each approach, in a band of its {LEVEL}% interval"
FEW_LABELS = 9
BAND_POINTS = 60
SHOWN_PERCENTILES = (1.0, 99.0)  # of a region that the axes of a cloud hold, with a margin
MOST_DOTS = 1500
CLOUD_MARGIN = 0.25

Chart = Callable[[Fit, Palette], "Figure"]


def valleys(fit: Fit, palette: Palette) -> Figure:
    """The runs of each budget over their size, with approach 2's parabolas and vertices."""
    figure, axes = canvas(palette, 3.9, "parameters N", LOSS)
    points, isoflop = fit.points, fit.estimates.isoflop
    budgets = points.budgets
    has_labels = len(budgets) <= FEW_LABELS
    parabolas = {valley.budget: valley for valley in isoflop.valleys} if isoflop else {}
    for budget, color in zip(budgets, spread_colors(len(budgets)), strict=True):
        mine = points.budget_P == budget
        runs = points.parameters_P[mine], points.loss_P[mine]
        label = f"{budget:.3g}" if has_labels else None
        axes.plot(*runs, "o", color=color, markersize=4, label=label)
        valley = parabolas.get(budget)
        if valley and np.isfinite(valley.parameters):
            _parabola(axes, valley, color)
        if valley and valley.is_used:
            lowest = [valley.parameters], [valley.loss]
            axes.plot(*lowest, "*", color=palette.ink, markersize=9, zorder=5)
    if isoflop:
        axes.plot([], [], "*", color=palette.ink, markersize=9, label="lowest point")
    axes.set_xscale("log")
    log_amount_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    legend(axes, palette, title=FLOPS if has_labels else "")
    return figure


def frontier(fit: Fit, palette: Palette) -> Figure:
    """Every run's loss over its FLOPs, and the least loss by each approach, with bands."""
    figure, axes = canvas(palette, 4.2, FLOPS, LOSS)
    runs = fit.points.flops_P, fit.points.loss_P
    axes.plot(*runs, "o", color=palette.faint, markersize=3, alpha=0.7, label="runs")
    _lines_with_bands(axes, fit, [approach.loss for approach in fit.approaches])
    if fit.holdouts:
        _held_out(axes, fit, palette)
    _mark_largest_run(axes, fit, palette)
    _log_flops_and_loss(axes)
    legend_above(figure, axes, palette, f"least loss {BANDS}")
    return figure


def optimal_sizes(fit: Fit, palette: Palette) -> Figure:
    """N* over C for each approach, with bands and the lowest points of approach 2's parabolas."""
    sizes = [approach.parameters for approach in fit.approaches]
    return _optimum(fit, palette, "optimal parameters N*", sizes, is_tokens=False)


def optimal_tokens(fit: Fit, palette: Palette) -> Figure:
    """D* over C for each approach, with bands."""

    def tokens_of(approach) -> Callable[[float], Interval]:
        return lambda log_flops: approach.tokens(log_flops, fit.flops_law)

    tokens = [tokens_of(approach) for approach in fit.approaches]
    return _optimum(fit, palette, "optimal tokens D*", tokens, is_tokens=True)


def residuals(fit: Fit, palette: Palette) -> Figure:
    """The relative error of approach 3's law for each run, over its FLOPs, colored by D/N."""
    from matplotlib.colors import LogNorm

    figure, axes = canvas(palette, 3.4, FLOPS, "(predicted - measured) / measured loss, %")
    assert fit.estimates.parametric
    points = fit.points
    predicted_P = fit.estimates.parametric.law.loss(points.parameters_P, points.tokens_P)
    error_P = 100 * relative_error(predicted_P, points.loss_P)
    ratio_P = points.tokens_P / points.parameters_P
    norm = LogNorm(ratio_P.min(), max(ratio_P.max(), 1.01 * ratio_P.min()))
    shown = axes.scatter(
        points.flops_P, error_P, c=ratio_P, cmap="viridis", norm=norm, s=18, linewidths=0
    )
    axes.axhline(0, color=palette.faint, linewidth=0.8)
    axes.set_xscale("log")
    log_ticks(axes.xaxis, flops_text)
    bar = figure.colorbar(shown, ax=axes, pad=0.02, aspect=30)
    bar.set_label("tokens per parameter D/N", color=palette.faint, fontsize=8.5)
    log_amount_ticks(bar.ax.yaxis)
    bar.ax.tick_params(which="both", colors=palette.faint, labelsize=8, length=0)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def envelope_curves(fit: Fit, palette: Palette) -> Figure:
    """Approach 1's curves over FLOPs, and which of them is lowest where."""
    figure, axes = canvas(palette, 4.2, FLOPS, LOSS)
    envelope = fit.estimates.envelope
    assert envelope
    curves = envelope.curves
    flops_G = np.exp(curves.log_flops_G)
    is_trained = envelope.kind == "curves"
    one = "loss of a run while it trains" if is_trained else "finished runs of one size"
    style = {"color": palette.faint, "linewidth": 0.8, "alpha": 0.6}
    for index, loss_G in enumerate(curves.loss_RG):
        axes.plot(flops_G, loss_G, label=None if index else one, **style)
    inside = np.isfinite(envelope.n_G)
    lowest_G = np.nanmin(np.where(np.isfinite(curves.loss_RG), curves.loss_RG, np.inf), axis=0)
    lowest = flops_G[inside], lowest_G[inside]
    label = "lowest, between a smaller and a larger size"
    axes.plot(*lowest, "o", color=APPROACH_COLORS["envelope"], markersize=3.5, label=label)
    _log_flops_and_loss(axes)
    legend(axes, palette)
    return figure


def exponent_cloud(fit: Fit, palette: Palette) -> Figure:
    """The region's alpha and beta: how well the runs determine the two exponents."""
    labels = "alpha, exponent of the size N", "beta, exponent of the data D"
    figure, axes = canvas(palette, 3.6, *labels)
    law = fit.approach("parametric")
    assert law
    assert law.region
    alpha_K, beta_K = law_of(law.region).theta[:, 3:].T
    _cloud(axes, alpha_K, beta_K, APPROACH_COLORS["parametric"], "confidence region")
    alpha, beta = law_of(law.line).theta[3:]
    found = [alpha], [beta]
    axes.plot(*found, "*", color=palette.ink, markersize=10, label="fit of all runs")
    outside = _keep_to_the_middle(axes, alpha_K, beta_K)
    legend(axes, palette, title=outside)
    return figure


def optimum_cloud(fit: Fit, palette: Palette) -> Figure:
    """The optimum beyond the largest budget: size against loss, by every approach with a region."""
    flops, _ = beyond(float(fit.points.budgets[-1]))
    log_flops = float(np.log(flops))
    labels = f"optimal parameters N* at {flops:.3g} FLOPs", f"its {LOSS}"
    figure, axes = canvas(palette, 3.6, *labels)
    clouds = []
    for approach in fit.approaches:
        if approach.region is None:
            continue
        with np.errstate(over="ignore"):  # infinite ones are outside the axes
            size_K = np.exp(approach.region.log_parameters(log_flops))
            loss_K = approach.region.loss(log_flops)
        clouds.append((size_K, loss_K))
        _cloud(axes, size_K, loss_K, APPROACH_COLORS[approach.key], f"{approach.title}, region")
    for index, approach in enumerate(fit.approaches):
        size, loss = np.exp(approach.line.log_parameters(log_flops)), approach.line.loss(log_flops)
        axes.plot(
            [size], [loss], "*", color=APPROACH_COLORS[approach.key], markeredgecolor=palette.ink,
            markeredgewidth=0.8, markersize=11, zorder=5,
            label=None if index else "fit of all runs",
        )  # fmt: skip
    axes.set_xscale("log")
    size_K, loss_K = (np.concatenate(column) for column in zip(*clouds, strict=True))
    outside = _keep_to_the_middle(axes, size_K, loss_K)
    log_amount_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    legend(axes, palette, title=outside)
    return figure


def flops_text(value: float) -> str:
    """FLOPs as 10^11 or 2 x 10^11, set as a formula."""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    digits = f"{value / 10.0**exponent:.3g}"
    return f"$10^{{{exponent}}}$" if digits == "1" else f"${digits} \\times 10^{{{exponent}}}$"


def _log_flops_and_loss(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis, flops_text)
    plain_ticks(axes.yaxis)


def _optimum(
    fit: Fit,
    palette: Palette,
    label: str,
    values: Sequence[Callable[[float], Interval]],
    is_tokens: bool,
) -> Figure:
    figure, axes = canvas(palette, 4.2, FLOPS, label)
    _lines_with_bands(axes, fit, values)
    isoflop = fit.estimates.isoflop
    if used := [valley for valley in isoflop.valleys if valley.is_used] if isoflop else []:
        budget_F = np.array([valley.budget for valley in used])
        size_F = np.array([valley.parameters for valley in used])
        if is_tokens:
            size_F = np.exp(fit.flops_law.log_tokens(np.log(budget_F), np.log(size_F)))
        lowest = "lowest point of a parabola"
        axes.plot(budget_F, size_F, "*", color=palette.ink, markersize=8, label=lowest)
    _mark_largest_run(axes, fit, palette)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis, flops_text)
    log_amount_ticks(axes.yaxis)
    legend_above(figure, axes, palette, f"optimum {BANDS}")
    return figure


def _parabola(axes: Axes, valley: Valley, color: str) -> None:
    n_X = np.linspace(np.log(valley.smallest), np.log(valley.largest), BAND_POINTS)
    curve_X = valley.loss + valley.bend / 2 * (n_X - np.log(valley.parameters)) ** 2
    axes.plot(np.exp(n_X), curve_X, color=color, linewidth=1.3)


def _lines_with_bands(axes: Axes, fit: Fit, values: Sequence[Callable[[float], Interval]]) -> None:
    """A line and a band per approach, from the smallest run to beyond the largest budget."""
    low, high = np.log(fit.points.flops_P.min()), np.log(beyond(float(fit.points.flops_P.max()))[0])
    log_flops_X = np.linspace(low, high, BAND_POINTS)
    flops_X = np.exp(log_flops_X)
    for approach, value_at in zip(fit.approaches, values, strict=True):
        items = [value_at(float(log_flops)) for log_flops in log_flops_X]
        color, line = APPROACH_COLORS[approach.key], [item.value for item in items]
        axes.plot(flops_X, line, color=color, linewidth=1.5, label=approach.title)
        lows, highs = [item.low for item in items], [item.high for item in items]
        axes.fill_between(flops_X, lows, highs, color=color, alpha=0.16, linewidth=0)


def _mark_largest_run(axes: Axes, fit: Fit, palette: Palette) -> None:
    dashed = {"linewidth": 0.8, "linestyle": (0, (4, 3)), "label": "largest run fitted"}
    axes.axvline(fit.points.flops_P.max(), color=palette.faint, **dashed)


def _held_out(axes: Axes, fit: Fit, palette: Palette) -> None:
    """Held-out runs and what approach 3 predicts for each, which is above the frontier for most."""
    flops = [item.flops for item in fit.holdouts]
    predicted = [item.predicted for item in fit.holdouts]
    color = APPROACH_COLORS["parametric"]
    ends = np.array([(each.low, each.high) for each in predicted])
    bounded = (np.isfinite(ends) & (ends > 0)).all(axis=1)
    axes.vlines(np.array(flops)[bounded], *ends[bounded].T, color=color, linewidth=1.0)
    dashes = {"color": color, "markersize": 13, "markeredgewidth": 1.8, "zorder": 5}
    label = "prediction for that run"
    measured = [item.measured for item in fit.holdouts]
    axes.plot(flops, measured, "D", color=palette.ink, markersize=4, label="run held out", zorder=6)
    axes.plot(flops, [each.value for each in predicted], "_", label=label, **dashes)


def _cloud(axes: Axes, x_K: Array, y_K: Array, color: str, label: str) -> None:
    every = slice(None, None, max(1, len(x_K) // MOST_DOTS))
    axes.scatter(x_K[every], y_K[every], s=7, color=color, alpha=0.35, linewidths=0)
    axes.plot([], [], "o", color=color, markersize=4, label=label)


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
