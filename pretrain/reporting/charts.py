"""One look for every chart: colors, ticks, legends, and the figure as SVG, PNG, PDF and CSV.
Torch-free. `charts.mplstyle` has the rest of the look.

On a page, COLORS become variables of its style sheet, which follow the reader's light or dark
setting.
"""

from __future__ import annotations

import html
import io
import math
import re
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

STYLE = Path(__file__).with_name("charts.mplstyle")
# Of a single chart: narrow, so that its text is large enough on a phone 400 px wide.
CHART_WIDTH_INCHES = 4.6
PIXELS_PER_INCH, WIDEST_PIXELS = 113, 620  # on a page, at most
LEGEND_ROW_INCHES, LEGEND_CHARACTERS_PER_INCH, MOST_COLUMNS = 0.18, 16, 5
INK, FAINT, GRID, ALARM, SURFACE = "#22252a", "#50555d", "#e4e2dc", "#c2410c", "#ffffff"
FIRST, SECOND = "#b9c7dd", "#2456a6"
COLORS = {
    "ink": INK,
    "faint": FAINT,
    "grid": GRID,
    "alarm": ALARM,
    "surface": SURFACE,
    "first": FIRST,
    "second": SECOND,
}
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
class Panel:
    """A chart's title, the labels of its axes, and what draws it."""

    title: str
    x_label: str
    y_label: str
    draw: Callable[[Axes], None]


def canvas(height_inches: float, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A figure with one chart, and its axes."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rc_file(STYLE, use_default_template=False)
    figure = Figure(figsize=(CHART_WIDTH_INCHES, height_inches))
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


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


def large_number_ticks(axis: Axis) -> None:
    """Ticks of a linear axis that reaches 1,000 or more: 2,000, and from 100,000 on 200 k."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    highest = max(map(abs, axis.get_view_interval()))
    if highest < 1000 or axis.get_scale() != "linear":
        return
    axis.set_major_locator(MaxNLocator(5))
    text = si if highest >= 1e5 else "{:,g}".format
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value).strip()))


def plain_ticks(axis: Axis) -> None:
    """Losses as 3.50 and not 3.5 x 10^0, all with as many decimals."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(ScalarFormatter(useOffset=False))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, title: str = "", **options: Any) -> None:
    """A legend, if anything has a label, on a background that hides lines behind it."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(title=title, alignment="left", **options)


def legend_above(figure: Figure, axes: Axes, title: str = "", most_columns: int = 3) -> None:
    """The legend of these axes outside of them, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = _legend_columns(figure, labels, most_columns)
    position: Any = "outside upper center"
    figure.legend(handles, labels, loc=position, ncols=columns, frameon=False, title=title)


def _legend_columns(figure: Figure, labels: Sequence[str], most: int = 3) -> int:
    """How many columns of a legend's labels are no wider than the figure."""
    characters = LEGEND_CHARACTERS_PER_INCH * figure.get_figwidth()
    return max(1, min(most, len(labels), int(characters // (max(map(len, labels), default=0) + 6))))


def chart_html(figure: Figure, alternative: str) -> str:
    """The drawing as inline SVG; `alternative` describes it for screen readers."""
    buffer = io.StringIO()
    metadata: Any = {"Date": None, "Creator": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    svg = re.sub(r"^.*?<svg", "<svg", buffer.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    widest = min(WIDEST_PIXELS, round(PIXELS_PER_INCH * figure.get_figwidth()))
    shown = f'role="img" aria-label="{html.escape(alternative)}" style="max-width: {widest}px"'
    svg = svg.replace("<svg", f"<svg {shown}", 1)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg


def panel_html(panel: Panel, height_inches: float, directory: Path, about: str) -> str:
    """One panel as inline SVG; `save_figure` writes it to `directory` under its title, too.

    `about` names the runs that it shows.
    """
    figure, axes = canvas(height_inches, panel.x_label, panel.y_label)
    if panel.x_label in ("step", "tokens"):
        axes.locator_params("x", integer=True)
    panel.draw(axes)
    large_number_ticks(axes.xaxis)
    large_number_ticks(axes.yaxis)
    if labels := axes.get_legend_handles_labels()[1]:
        legend_above(figure, axes, most_columns=MOST_COLUMNS)
        rows = -(-len(labels) // _legend_columns(figure, labels, MOST_COLUMNS))
        figure.set_figheight(height_inches + LEGEND_ROW_INCHES * rows)
    directory.mkdir(parents=True, exist_ok=True)
    save_figure(
        directory / panel.title.lower().replace(" ", "-"), figure, f"{panel.title}: {about}"
    )
    return chart_html(figure, f"{panel.title}: {panel.y_label} over {axes.get_xlabel()}")


def save_figure(path: Path, figure: Figure, title: str) -> None:
    """Write a figure of a paper beside `path`: as PNG, SVG and PDF, and what it draws as CSV.

    The title is among what the files say of themselves; a paper has its own caption.
    """
    for form, unwanted in (("png", "Software"), ("svg", "Date"), ("pdf", "CreationDate")):
        with atomic_write(path.with_suffix(f".{form}")) as file:
            figure.savefig(file, format=form, metadata={unwanted: None, "Title": title})
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
