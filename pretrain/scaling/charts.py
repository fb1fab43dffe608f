"""The charts of a scaling report, each drawn in the palette of the page or of print.

Legend: K draws, P points, X positions on an axis.
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
from pretrain.scaling.frontier import LawLine
from pretrain.scaling.intervals import LEVEL
from pretrain.scaling.isoflop import Valley
from pretrain.scaling.law import Law
from pretrain.scaling.points import Array
from pretrain.terminal.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

APPROACH_COLORS = {"envelope": SERIES[1], "isoflop": SERIES[2], "parametric": SERIES[0]}
LOSS = "loss (nats per token)"
FEW_LABELS = 9
BAND_POINTS = 60
FLOPS = "training FLOPs C"
BANDS = f"by each approach, in a band that holds {LEVEL} % of the bootstrap draws"

Chart = Callable[[Fit, Palette], "Figure"]


def valleys(fit: Fit, palette: Palette) -> Figure:
    """The runs of each budget over their size, with approach 2's parabolas and their lowest points."""
    figure, axes = canvas(palette, 3.9, "parameters N", LOSS)
    points, isoflop = fit.points, fit.estimates.isoflop
    budgets = points.budgets
    for budget, color in zip(budgets, spread_colors(len(budgets)), strict=True):
        mine = points.budget_P == budget
        label = f"{budget:.3g}" if len(budgets) <= FEW_LABELS else None
        axes.plot(
            points.parameters_P[mine],
            points.loss_P[mine],
            "o",
            color=color,
            markersize=4,
            label=label,
        )
        valley = next((v for v in isoflop.valleys if v.budget == budget), None) if isoflop else None
        if valley and np.isfinite(valley.parameters):
            _parabola(axes, valley, color)
        if valley and valley.is_used:
            axes.plot(
                [valley.parameters], [valley.loss], "*", color=palette.ink, markersize=9, zorder=5
            )
    if isoflop:
        axes.plot([], [], "*", color=palette.ink, markersize=9, label="lowest point")
    axes.set_xscale("log")
    log_amount_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    legend(axes, palette, title=FLOPS if len(budgets) <= FEW_LABELS else "")
    return figure


def frontier(fit: Fit, palette: Palette) -> Figure:
    """Every run's loss over its FLOPs, and the least loss that each approach predicts, with bands."""
    figure, axes = canvas(palette, 4.2, FLOPS, LOSS)
    axes.plot(
        fit.points.flops_P,
        fit.points.loss_P,
        "o",
        color=palette.faint,
        markersize=3,
        alpha=0.7,
        label="runs",
    )
    log_flops_X = _axis_of_flops(fit)
    for approach in fit.approaches:
        values = [approach.loss(float(c)) for c in log_flops_X]
        _line_with_band(axes, log_flops_X, values, APPROACH_COLORS[approach.key], approach.title)
    if fit.holdouts:
        flops, losses = zip(*((item.flops, item.measured) for item in fit.holdouts), strict=True)
        axes.plot(
            flops, losses, "D", color=palette.ink, markersize=5, label="run held out", zorder=5
        )
    _largest_budget(axes, fit, palette)
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis, flops_text)
    plain_ticks(axes.yaxis)
    legend_above(figure, axes, palette, f"least loss {BANDS}")
    return figure


def optimal_sizes(fit: Fit, palette: Palette) -> Figure:
    """N* over C for each approach, with bands and the lowest points of approach 2's parabolas."""
    return _optimum(
        fit,
        palette,
        "optimal parameters N*",
        lambda approach, c: approach.parameters(c),
        tokens=False,
    )


def optimal_tokens(fit: Fit, palette: Palette) -> Figure:
    """D* over C for each approach, with bands."""
    return _optimum(
        fit,
        palette,
        "optimal tokens D*",
        lambda approach, c: approach.tokens(c, fit.flops_law),
        tokens=True,
    )


def residuals(fit: Fit, palette: Palette) -> Figure:
    """How far approach 3's law lies from each run's loss, over its FLOPs, colored by its tokens per parameter."""
    from matplotlib.colors import LogNorm

    figure, axes = canvas(palette, 3.4, FLOPS, "(predicted - measured) / measured loss, %")
    law = fit.approach("parametric")
    assert law
    assert isinstance(law.line, LawLine)
    points = fit.points
    predicted_P = Law.from_theta(law.line.theta).loss(points.parameters_P, points.tokens_P)
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
    one = (
        "loss of a run while it trains"
        if envelope.kind == "curves"
        else "finished runs of one size"
    )
    for index, loss_G in enumerate(curves.loss_RG):
        axes.plot(
            flops_G,
            loss_G,
            color=palette.faint,
            linewidth=0.8,
            alpha=0.6,
            label=None if index else one,
        )
    inside = np.isfinite(envelope.n_G)
    lowest_G = np.nanmin(np.where(np.isfinite(curves.loss_RG), curves.loss_RG, np.inf), axis=0)
    label = "lowest, with a smaller and a larger size beside it"
    axes.plot(
        flops_G[inside],
        lowest_G[inside],
        "o",
        color=APPROACH_COLORS["envelope"],
        markersize=3.5,
        label=label,
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis, flops_text)
    plain_ticks(axes.yaxis)
    legend(axes, palette)
    return figure


def flops_text(value: float) -> str:
    """FLOPs as 10^11 or 2 x 10^11, set as a formula."""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    digits = f"{value / 10.0**exponent:.3g}"
    return f"$10^{{{exponent}}}$" if digits == "1" else f"${digits} \\times 10^{{{exponent}}}$"


def _optimum(fit: Fit, palette: Palette, label: str, value_of: Callable, tokens: bool) -> Figure:
    figure, axes = canvas(palette, 4.2, FLOPS, label)
    log_flops_X = _axis_of_flops(fit)
    for approach in fit.approaches:
        values = [value_of(approach, float(c)) for c in log_flops_X]
        _line_with_band(axes, log_flops_X, values, APPROACH_COLORS[approach.key], approach.title)
    used = (
        [valley for valley in fit.estimates.isoflop.valleys if valley.is_used]
        if fit.estimates.isoflop
        else []
    )
    if used:
        budget_F, size_F = (
            np.array([getattr(v, name) for v in used]) for name in ("budget", "parameters")
        )
        if tokens:
            size_F = np.exp(fit.flops_law.log_tokens(np.log(budget_F), np.log(size_F)))
        axes.plot(
            budget_F,
            size_F,
            "*",
            color=palette.ink,
            markersize=8,
            label="lowest point of a parabola",
        )
    _largest_budget(axes, fit, palette)
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


def _axis_of_flops(fit: Fit) -> Array:
    low, high = np.log(fit.points.flops_P.min()), np.log(beyond(float(fit.points.flops_P.max()))[0])
    return np.linspace(low, high, BAND_POINTS)


def _line_with_band(
    axes: Axes, log_flops_X: Array, values: Sequence, color: str, label: str
) -> None:
    flops_X = np.exp(log_flops_X)
    axes.plot(flops_X, [item.value for item in values], color=color, linewidth=1.5, label=label)
    axes.fill_between(
        flops_X,
        [item.low for item in values],
        [item.high for item in values],
        color=color,
        alpha=0.16,
        linewidth=0,
    )


def _largest_budget(axes: Axes, fit: Fit, palette: Palette) -> None:
    axes.axvline(
        fit.points.flops_P.max(),
        color=palette.faint,
        linewidth=0.8,
        linestyle=(0, (4, 3)),
        label="largest run fitted",
    )


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
