"""What the pictures of all scaling reports share: colours, axes, ticks, legends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pretrain.reporting import html as report
from pretrain.scaling.wording import amount

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH_INCHES = 6.2
PANELS_IN_A_ROW = 3
LOSS = "loss (nats per token)"
ORDERED_COLOURS = (
    "#4f83d6",
    "#3aa0b8",
    "#2f9e6e",
    "#86a03a",
    "#c9a02b",
    "#d9772f",
    "#d1495b",
    "#a05bb5",
)
# Decades that an axis spans at most -> where within a decade it has ticks
TICKS_OF_A_DECADE = (
    (0.7, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)),
    (2.2, (1.0, 2.0, 5.0)),
    (np.inf, (1.0,)),
)


@dataclass(frozen=True)
class Palette:
    """What differs between a picture in the page and one in a file of its own."""

    ink: str
    faint: str
    grid: str
    surface: str


PAGE = Palette(report.INK, report.FAINT, report.GRID, report.SURFACE)
PRINT = Palette("#22252a", "#50555d", "#e4e2dc", "#ffffff")


def canvas(
    palette: Palette, height_inches: float, x_label: str, y_label: str
) -> tuple[Figure, Axes]:
    """A figure with quiet axes, and its axes."""
    figure, (axes,) = panels(palette, height_inches, 1, x_label, y_label)
    return figure, axes


def panels(
    palette: Palette, height_inches: float, count: int, x_label: str, y_label: str
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` axes beside each other that share their scales; each row is `height_inches` high."""
    from matplotlib.figure import Figure

    rows, columns = -(-count // PANELS_IN_A_ROW), min(count, PANELS_IN_A_ROW)
    figure = Figure(figsize=(WIDTH_INCHES, rows * height_inches), layout="constrained")
    figure.set_facecolor(palette.surface)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for unused in grid.flat[count:]:
        unused.set_visible(False)
    for index, axes in enumerate(grid.flat[:count]):
        _make_quiet(axes, palette)
        if index % columns == 0:
            axes.set_ylabel(y_label, color=palette.faint, fontsize=8.5)
        axes.tick_params(labelbottom=index + columns >= count)
    if count == 1:
        grid[0, 0].set_xlabel(x_label, color=palette.faint, fontsize=8.5)
    else:
        figure.supxlabel(x_label, color=palette.faint, fontsize=8.5)
    return figure, list(grid.flat[:count])


def log_ticks(axis: Axis, text: Callable[[float], str]) -> None:
    """Ticks of a logarithmic axis whose labels do not run into each other; call it when all is drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    places = next(
        places for decades, places in TICKS_OF_A_DECADE if np.log10(high / low) <= decades
    )
    axis.set_major_locator(LogLocator(subs=places, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def flops_text(value: float) -> str:
    """FLOPs as 10^11 or 2 x 10^11, set as a formula."""
    exponent = int(np.floor(np.log10(value) + 1e-9))
    digits = f"{value / 10.0**exponent:.3g}"
    return f"$10^{{{exponent}}}$" if digits == "1" else f"${digits} \\times 10^{{{exponent}}}$"


def log_flops_axis(axes: Axes) -> None:
    """The x axis as training FLOPs."""
    log_ticks(axes.xaxis, flops_text)


def log_amount_axis(axis: Axis) -> None:
    """An axis of parameters or tokens: 20k, 50k, 100k."""
    log_ticks(axis, amount)


def plain_ticks(axis: Axis) -> None:
    """Losses as 3.50 and not 3.5 x 10^0, all with as many decimals."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(ScalarFormatter(useOffset=False))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, palette: Palette, title: str = "", **options) -> None:
    """A legend where it covers least, on a ground that keeps lines from running through it."""
    shown = axes.legend(
        fontsize=8, labelcolor=palette.ink, handlelength=1.8, title=title, facecolor=palette.surface,
        edgecolor="none", framealpha=0.85, alignment="left", **options,
    )  # fmt: skip
    shown.get_title().set_color(palette.faint)
    shown.get_title().set_fontsize(8)


def legend_above(figure: Figure, axes: Axes, palette: Palette, title: str) -> None:
    """The legend of these axes outside of them, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    shown = figure.legend(
        handles, labels, loc="outside upper center", ncols=min(3, len(labels)), frameon=False, fontsize=8,
        labelcolor=palette.ink, handlelength=1.8, title=title,
    )  # fmt: skip
    shown.get_title().set(color=palette.faint, fontsize=8)


def spread_colours(count: int) -> list[str]:
    """As many colours as there are values, in an order that follows theirs."""
    return [
        ORDERED_COLOURS[round(i * (len(ORDERED_COLOURS) - 1) / max(1, count - 1))]
        for i in range(count)
    ]


def _make_quiet(axes: Axes, palette: Palette) -> None:
    axes.set_facecolor("none")
    axes.tick_params(which="both", colors=palette.faint, labelsize=8.5, length=0)
    axes.grid(color=palette.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette.grid)
