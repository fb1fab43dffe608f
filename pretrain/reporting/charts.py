"""One look for every chart: palette, quiet axes, ticks, legends, and the drawing as SVG or PNG.
Torch-free.

A chart is drawn twice where it is shown twice: into an HTML page with PAGE, whose colors follow the
reader's light or dark setting, and into a PNG with PRINT.
"""

from __future__ import annotations

import html
import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.csv_files import write_csv
from foundation.files import atomic_write
from pretrain.terminal.text import si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH_INCHES = 6.2
# Of a single chart on a page: narrow, so that its text is large enough on a phone 400 px wide.
CHART_WIDTH_INCHES = 4.6
PIXELS_PER_INCH, WIDEST_PIXELS = 113, 620  # on a page, at most
PANEL_INCHES = (6.0, 3.2)  # of several charts in one PNG
PANELS_IN_A_ROW = 3  # of several axes in one chart
DPI = 150
SMALL = 8.5  # points
LEGEND_ROW_INCHES, LEGEND_CHARACTERS_PER_INCH = 0.18, 16
TITLE_CHARACTERS = 58  # that fit above one panel at the title's font size
# Colors that can be told apart, for series without an order ...
SERIES = (
    "#4f83d6",
    "#d9772f",
    "#2f9e6e",
    "#a05bb5",
    "#c9a02b",
    "#d1495b",
    "#3aa0b8",
    "#86a03a",
)
# ... and from purple over blue and green to amber, for series that have one: each is lighter than
# the one before, so that they can be told apart in grey, too ...
SPECTRUM = (
    "#5a2695",
    "#3550ab",
    "#1b77ac",
    "#229298",
    "#39a776",
    "#7fa841",
    "#bca828",
    "#efa63c",
)
# ... with a marker for each of a dozen.
MARKERS = "osD^vPX<>ph8"
# Decades that an axis spans at most -> where within a decade it has ticks; shorter axes are as
# good as linear
SHORT_AXIS = 0.3
TICKS_OF_A_DECADE = (
    (0.7, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)),
    (2.2, (1.0, 2.0, 5.0)),
    (np.inf, (1.0,)),
)


@dataclass(frozen=True)
class Palette:
    """Colors by purpose; the page's style sheet has variables of the same names."""

    ink: str
    faint: str
    grid: str
    first: str
    second: str
    alarm: str
    surface: str


# matplotlib accepts no CSS variables, so the page's charts are drawn in placeholders that
# `chart_html` replaces.
PAGE = Palette("#010101", "#020202", "#030303", "#040404", "#050505", "#060606", "#070707")
PRINT = Palette("#22252a", "#50555d", "#e4e2dc", "#b9c7dd", "#2456a6", "#c2410c", "#ffffff")


@dataclass(frozen=True)
class Panel:
    """A chart's title, the labels of its axes, and what draws it."""

    title: str
    x_label: str
    y_label: str
    draw: Callable[[Axes, Palette], None]


def canvas(
    palette: Palette, height_inches: float, x_label: str, y_label: str
) -> tuple[Figure, Axes]:
    """A figure with quiet axes, and its axes."""
    width_inches = CHART_WIDTH_INCHES if palette is PAGE else WIDTH_INCHES
    figure, (axes,) = panels(palette, height_inches, 1, x_label, y_label, width_inches)
    return figure, axes


def panels(
    palette: Palette,
    height_inches: float,
    count: int,
    x_label: str,
    y_label: str,
    width_inches: float = WIDTH_INCHES,
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` axes with common scales; each row is `height_inches` high."""
    from matplotlib.figure import Figure

    rows, columns = -(-count // PANELS_IN_A_ROW), min(count, PANELS_IN_A_ROW)
    figure = Figure(figsize=(width_inches, rows * height_inches), layout="constrained")
    figure.set_facecolor(palette.surface)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for unused in grid.flat[count:]:
        unused.set_visible(False)
    for index, axes in enumerate(grid.flat[:count]):
        _make_quiet(axes, palette)
        if index % columns == 0:
            axes.set_ylabel(y_label, color=palette.faint, fontsize=SMALL)
        axes.tick_params(labelbottom=index + columns >= count)
    if count == 1:
        grid[0, 0].set_xlabel(x_label, color=palette.faint, fontsize=SMALL)
    else:
        figure.supxlabel(x_label, color=palette.faint, fontsize=SMALL)
    return figure, list(grid.flat[:count])


def _make_quiet(axes: Axes, palette: Palette) -> None:
    axes.set_facecolor("none")
    axes.tick_params(which="both", colors=palette.faint, labelsize=SMALL, length=0)
    axes.grid(color=palette.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette.grid)


def spread_colors(count: int) -> list[str]:
    """As many different colors as there are values, in an order that follows theirs."""
    places = [i * (len(SPECTRUM) - 1) / max(1, count - 1) for i in range(count)]
    if count <= len(SPECTRUM):
        return [SPECTRUM[round(place)] for place in places]
    return [
        _blended(SPECTRUM[int(place)], SPECTRUM[math.ceil(place)], place % 1) for place in places
    ]


def spread_markers(count: int) -> list[str]:
    """A marker for each value, which repeat after a dozen."""
    return [MARKERS[index % len(MARKERS)] for index in range(count)]


def _blended(first: str, second: str, part: float) -> str:
    """The color that is `part` of the way from the first to the second."""
    pairs = zip(bytes.fromhex(first[1:]), bytes.fromhex(second[1:]), strict=True)
    return "#" + bytes(round(low + part * (high - low)) for low, high in pairs).hex()


def log_ticks(axis: Axis, text: Callable[[float], str] = "{:g}".format) -> None:
    """Ticks of a log axis whose labels do not overlap; call it when everything is drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    span = np.log10(high / low)
    places = next(places for decades, places in TICKS_OF_A_DECADE if span <= decades)
    short = MaxNLocator(4, steps=[1, 2, 5, 10])
    axis.set_major_locator(short if span <= SHORT_AXIS else LogLocator(subs=places, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def log_amount_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis of parameters or tokens: 20k, 50k, 100k."""
    log_ticks(axis, lambda value: si(value).replace(" ", ""))


def plain_ticks(axis: Axis) -> None:
    """Losses as 3.50 and not 3.5 x 10^0, all with as many decimals."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(ScalarFormatter(useOffset=False))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, palette: Palette, title: str = "", **options: Any) -> None:
    """A legend, if anything has a label, on a background that hides lines behind it."""
    if not axes.get_legend_handles_labels()[1]:
        return
    shown = axes.legend(
        fontsize=8, labelcolor=palette.ink, handlelength=1.8, title=title, edgecolor="none",
        facecolor=palette.surface, framealpha=0.85, alignment="left", **options,
    )  # fmt: skip
    shown.get_title().set(color=palette.faint, fontsize=8)


def legend_above(
    figure: Figure, axes: Axes, palette: Palette, title: str, most_columns: int = 3
) -> None:
    """The legend of these axes outside of them, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = _legend_columns(figure, labels, most_columns)
    shown = figure.legend(
        handles, labels, loc="outside upper center", ncols=columns, frameon=False,
        fontsize=8, labelcolor=palette.ink, handlelength=1.8, title=title,
    )  # fmt: skip
    shown.get_title().set(color=palette.faint, fontsize=8)


def _legend_columns(figure: Figure, labels: Sequence[str], most: int = 3) -> int:
    """How many columns of a legend's labels are no wider than the figure."""
    characters = LEGEND_CHARACTERS_PER_INCH * figure.get_figwidth()
    return max(1, min(most, len(labels), int(characters // (max(map(len, labels), default=0) + 6))))


def _take_texts_literally(figure: Figure) -> None:
    """Show a `$` in names as it is: matplotlib would read what is between two as a formula."""
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    waiting: list[Any] = [figure]
    while waiting:
        artist = waiting.pop()
        if isinstance(artist, Text):
            artist.set_parse_math(False)
        # The labels of ticks are formulas of matplotlib's own.
        waiting += [artist.label] if isinstance(artist, Axis) else artist.get_children()


def chart_html(figure: Figure, alternative: str) -> str:
    """The drawing as inline SVG; `alternative` describes it for screen readers."""
    import matplotlib

    _take_texts_literally(figure)
    buffer = io.StringIO()
    # Text remains text, and the same drawing gives the same bytes.
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": alternative}
    with matplotlib.rc_context(options):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = re.sub(r"^.*?<svg", "<svg", buffer.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    widest = min(WIDEST_PIXELS, round(PIXELS_PER_INCH * figure.get_figwidth()))
    shown = f'role="img" aria-label="{html.escape(alternative)}" style="max-width: {widest}px"'
    svg = svg.replace("<svg", f"<svg {shown}", 1)
    for name, placeholder in vars(PAGE).items():
        svg = svg.replace(placeholder, f"var(--{name})")
    return svg


def panel_html(panel: Panel, height_inches: float, alternative: str) -> str:
    """One panel as inline SVG."""
    figure, axes = canvas(PAGE, height_inches, panel.x_label, panel.y_label)
    panel.draw(axes, PAGE)
    if labels := axes.get_legend_handles_labels()[1]:
        legend_above(figure, axes, PAGE, "")
        rows = -(-len(labels) // _legend_columns(figure, labels))
        figure.set_figheight(height_inches + LEGEND_ROW_INCHES * rows)
    return chart_html(figure, alternative)


def save_png(path: Path, figure: Figure) -> None:
    """Write the figure as a PNG that appears whole or not at all."""
    _take_texts_literally(figure)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})


def save_figure(path: Path, figure: Figure) -> None:
    """Write a figure of a paper beside `path`: as PNG, SVG and PDF, and what it draws as CSV."""
    save_png(path.with_suffix(".png"), figure)
    for form in ("svg", "pdf"):
        date = {"Date": None} if form == "svg" else {"CreationDate": None}
        with atomic_write(path.with_suffix(f".{form}")) as file:
            figure.savefig(file, format=form, metadata=date)
    write_csv(path.with_suffix(".csv"), ("series", "x", "y"), drawn_values(figure))


def drawn_values(figure: Figure) -> list[dict[str, Any]]:
    """The points of all lines, marks and bands of a figure, with the names of their series."""
    rows = []
    for axes in figure.axes:
        series = [(str(line.get_label()), line.get_xydata()) for line in axes.lines]
        for shape in axes.collections:
            offsets = np.asarray(shape.get_offsets())
            outlines = [path.vertices for path in shape.get_paths()]
            places = [offsets] if len(offsets) > 1 else outlines
            series += [(str(shape.get_label()), np.asarray(each)) for each in places]
        for name, places in series:
            rows += [
                {"series": name.removeprefix("_"), "x": f"{x:.8g}", "y": f"{y:.8g}"}
                for x, y in np.asarray(places, float)
                if math.isfinite(x) and math.isfinite(y)
            ]
    return rows


def save_panels(path: Path, title: str, shown: Sequence[Panel]) -> None:
    """Draw the panels, two in a row, into a PNG."""
    from matplotlib.figure import Figure

    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    heading = textwrap.fill(title, TITLE_CHARACTERS * columns)  # breaks long words too
    figure = Figure(
        figsize=(
            PANEL_INCHES[0] * columns,
            PANEL_INCHES[1] * rows + 0.4 * (1 + heading.count("\n")),
        ),
        layout="constrained",
    )
    figure.suptitle(heading, fontsize=13, color=PRINT.ink)
    for number, panel in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, number)
        _make_quiet(axes, PRINT)
        axes.set_title(panel.title, fontsize=10.5, color=PRINT.ink, loc="left")
        axes.set_xlabel(panel.x_label, color=PRINT.faint, fontsize=SMALL)
        axes.set_ylabel(panel.y_label, color=PRINT.faint, fontsize=SMALL)
        panel.draw(axes, PRINT)
        legend(axes, PRINT, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside the curves
    save_png(path, figure)
