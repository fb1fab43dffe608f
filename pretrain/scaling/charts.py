"""The pictures of a scaling report, each drawn in the colours it is given: the page's or print's.

Legend: K draws, X places on an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pretrain import report
from pretrain.scaling.fit import BEYOND, Fit
from pretrain.scaling.law import log_loss
from pretrain.scaling.lines import LawLine
from pretrain.scaling.points import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 6.2
APPROACH_COLOURS = {"envelope": "#c9822b", "isoflop": "#2f9e6e", "parametric": "#4f83d6"}
BUDGET_COLOURS = ("#4f83d6", "#3aa0b8", "#2f9e6e", "#86a03a", "#c9a02b", "#d9772f", "#d1495b", "#a05bb5")
FEW_LABELS = 9
BAND_POINTS = 60


@dataclass(frozen=True)
class Palette:
    """What differs between a picture in the page and one in a file of its own."""

    ink: str
    faint: str
    grid: str
    surface: str


PAGE = Palette(report.INK, report.FAINT, report.GRID, report.SURFACE)
PRINT = Palette("#22252a", "#6d727b", "#e4e2dc", "#ffffff")

Chart = Callable[[Fit, Palette], "Figure"]


def valleys(fit: Fit, palette: Palette) -> Figure:
    """The runs of each budget over their size, with approach 2's parabolas and their lowest points."""
    figure, axes = canvas(palette, 3.9, "parameters N", "loss (nats per token)")
    points, isoflop = fit.points, fit.estimates.isoflop
    budgets = points.budgets
    for budget, colour in zip(budgets, _budget_colours(len(budgets)), strict=True):
        mine = points.budget_P == budget
        label = f"{budget:.3g}" if len(budgets) <= FEW_LABELS else None
        axes.plot(points.parameters_P[mine], points.loss_P[mine], "o", color=colour, markersize=4, label=label)
        valley = next((v for v in isoflop.valleys if v.budget == budget), None) if isoflop else None
        if valley and np.isfinite(valley.parameters):
            n_X = np.linspace(np.log(valley.smallest), np.log(valley.largest), BAND_POINTS)
            curve_X = valley.loss + valley.bend / 2 * (n_X - np.log(valley.parameters)) ** 2
            axes.plot(np.exp(n_X), curve_X, color=colour, linewidth=1.3)
        if valley and valley.is_used:
            axes.plot([valley.parameters], [valley.loss], "*", color=palette.ink, markersize=9, zorder=5)
    axes.set_xscale("log")
    if len(budgets) <= FEW_LABELS:
        legend(axes, palette, title="FLOPs")
    return figure


def frontier(fit: Fit, palette: Palette) -> Figure:
    """Every run's loss over its FLOPs, and the least loss that each approach predicts, with bands."""
    figure, axes = canvas(palette, 3.7, "training FLOPs C", "loss (nats per token)")
    axes.plot(fit.points.flops_P, fit.points.loss_P, "o", color=palette.faint, markersize=3, alpha=0.7)
    log_flops_X = _axis_of_flops(fit)
    for approach in fit.approaches:
        values = [approach.loss(float(c)) for c in log_flops_X]
        _line_with_band(axes, log_flops_X, values, APPROACH_COLOURS[approach.key], approach.title)
    if fit.holdouts:
        flops, losses = zip(*((item.flops, item.measured) for item in fit.holdouts), strict=True)
        axes.plot(flops, losses, "D", color=palette.ink, markersize=5, label="held out", zorder=5)
    _largest_budget(axes, fit, palette)
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    legend(axes, palette)
    return figure


def optimal_sizes(fit: Fit, palette: Palette) -> Figure:
    """N* over C for each approach, with bands and the lowest points of approach 2's parabolas."""
    return _optimum(fit, palette, "optimal parameters N*", lambda approach, c: approach.parameters(c), tokens=False)


def optimal_tokens(fit: Fit, palette: Palette) -> Figure:
    """D* over C for each approach, with bands."""
    return _optimum(
        fit, palette, "optimal tokens D*", lambda approach, c: approach.tokens(c, fit.flops_law), tokens=True
    )


def residuals(fit: Fit, palette: Palette) -> Figure:
    """How far each run's loss lies from approach 3's law, over its FLOPs, coloured by its tokens per parameter."""
    figure, axes = canvas(palette, 3.2, "training FLOPs C", "measured over predicted loss - 1, per cent")
    law = fit.approach("parametric")
    assert law
    assert isinstance(law.line, LawLine)
    points = fit.points
    error_P = np.log(points.loss_P) - log_loss(law.line.theta, np.log(points.parameters_P), np.log(points.tokens_P))
    ratio_P = np.log10(points.tokens_P / points.parameters_P)
    shown = axes.scatter(points.flops_P, 100 * np.expm1(error_P), c=ratio_P, cmap="coolwarm", s=16, linewidths=0)
    axes.axhline(0, color=palette.faint, linewidth=0.8)
    axes.set_xscale("log")
    bar = figure.colorbar(shown, ax=axes, pad=0.02, aspect=30)
    bar.set_label("log10 of tokens per parameter", color=palette.faint, fontsize=8.5)
    bar.ax.tick_params(colors=palette.faint, labelsize=8, length=0)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def exponent_cloud(fit: Fit, palette: Palette) -> Figure:
    """The bootstrap's alpha and beta: how well the runs tell the two exponents."""
    figure, axes = canvas(palette, 3.6, "alpha (size)", "beta (data)")
    law = fit.approach("parametric")
    assert law
    assert isinstance(law.line, LawLine)
    assert isinstance(law.draws, LawLine)
    _cloud(axes, law.draws.theta[:, 3], law.draws.theta[:, 4], APPROACH_COLOURS["parametric"], f"{fit.num_draws} draws")
    axes.plot([law.line.theta[3]], [law.line.theta[4]], "*", color=palette.ink, markersize=10, label="all runs")
    legend(axes, palette)
    return figure


def optimum_cloud(fit: Fit, palette: Palette) -> Figure:
    """The bootstrap's optimum beyond the largest budget: size against loss, by every approach."""
    log_flops = float(np.log(fit.points.budgets[-1])) + np.log(BEYOND)
    figure, axes = canvas(palette, 3.6, f"N* at {np.exp(log_flops):.2g} FLOPs", "loss there")
    for approach in fit.approaches:
        size_K = np.exp(approach.draws.log_parameters(log_flops))
        _cloud(axes, size_K, approach.draws.loss(log_flops), APPROACH_COLOURS[approach.key], approach.title)
    for approach in fit.approaches:
        size, loss = np.exp(approach.line.log_parameters(log_flops)), approach.line.loss(log_flops)
        axes.plot([size], [loss], "*", color=palette.ink, markersize=10, zorder=5)
    axes.set_xscale("log")
    legend(axes, palette)
    return figure


def envelope_curves(fit: Fit, palette: Palette) -> Figure:
    """Approach 1's curves over FLOPs, and which of them is lowest where."""
    figure, axes = canvas(palette, 3.7, "training FLOPs C", "loss (nats per token)")
    envelope = fit.estimates.envelope
    assert envelope
    curves = envelope.curves
    flops_G = np.exp(curves.log_flops_G)
    for loss_G in curves.loss_RG:
        axes.plot(flops_G, loss_G, color=palette.faint, linewidth=0.8, alpha=0.7)
    inside = np.isfinite(envelope.n_G)
    lowest_G = np.nanmin(np.where(np.isfinite(curves.loss_RG), curves.loss_RG, np.inf), axis=0)
    axes.plot(
        flops_G[inside], lowest_G[inside], "o", color=APPROACH_COLOURS["envelope"], markersize=3.5, label="lowest"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_ticks(axes.yaxis)
    legend(axes, palette)
    return figure


def _optimum(fit: Fit, palette: Palette, label: str, value_of: Callable, tokens: bool) -> Figure:
    figure, axes = canvas(palette, 3.7, "training FLOPs C", label)
    log_flops_X = _axis_of_flops(fit)
    for approach in fit.approaches:
        values = [value_of(approach, float(c)) for c in log_flops_X]
        _line_with_band(axes, log_flops_X, values, APPROACH_COLOURS[approach.key], approach.title)
    used = [valley for valley in fit.estimates.isoflop.valleys if valley.is_used] if fit.estimates.isoflop else []
    if used:
        budget_F, size_F = (np.array([getattr(v, name) for v in used]) for name in ("budget", "parameters"))
        if tokens:
            size_F = np.exp(fit.flops_law.log_tokens(np.log(budget_F), np.log(size_F)))
        axes.plot(budget_F, size_F, "*", color=palette.ink, markersize=8, label="lowest point of a parabola")
    _largest_budget(axes, fit, palette)
    axes.set_xscale("log")
    axes.set_yscale("log")
    legend(axes, palette)
    return figure


def _axis_of_flops(fit: Fit) -> Array:
    low, high = np.log(fit.points.flops_P.min()), np.log(fit.points.flops_P.max()) + np.log(BEYOND)
    return np.linspace(low, high, BAND_POINTS)


def _line_with_band(axes: Axes, log_flops_X: Array, values: Sequence, colour: str, label: str) -> None:
    flops_X = np.exp(log_flops_X)
    axes.plot(flops_X, [item.value for item in values], color=colour, linewidth=1.5, label=label)
    axes.fill_between(
        flops_X, [item.low for item in values], [item.high for item in values], color=colour, alpha=0.16, linewidth=0
    )


def _cloud(axes: Axes, x_K: Array, y_K: Array, colour: str, label: str) -> None:
    axes.scatter(x_K, y_K, s=7, color=colour, alpha=0.35, linewidths=0)
    axes.plot([], [], "o", color=colour, markersize=4, label=label)


def _largest_budget(axes: Axes, fit: Fit, palette: Palette) -> None:
    axes.axvline(
        fit.points.flops_P.max(), color=palette.faint, linewidth=0.8, linestyle=(0, (4, 3)), label="largest run"
    )


def _budget_colours(count: int) -> list[str]:
    return [BUDGET_COLOURS[round(i * (len(BUDGET_COLOURS) - 1) / max(1, count - 1))] for i in range(count)]


def canvas(palette: Palette, height_inches: float, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A figure with quiet axes, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    figure.set_facecolor(palette.surface)
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.set_xlabel(x_label, color=palette.faint, fontsize=8.5)
    axes.set_ylabel(y_label, color=palette.faint, fontsize=8.5)
    axes.tick_params(which="both", colors=palette.faint, labelsize=8.5, length=0)
    axes.grid(color=palette.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette.grid)
    return figure, axes


def plain_ticks(axis) -> None:
    """Losses as 3.5 and not 3.5 x 10^0."""
    from matplotlib.ticker import FormatStrFormatter, MaxNLocator, NullFormatter, NullLocator

    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(FormatStrFormatter("%.4g"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, palette: Palette, title: str = "") -> None:
    """A legend without a frame."""
    shown = axes.legend(frameon=False, fontsize=8, labelcolor=palette.ink, handlelength=1.6, title=title)
    shown.get_title().set_color(palette.faint)
    shown.get_title().set_fontsize(8)
