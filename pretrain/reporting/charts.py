"""The look of every chart, its files (SVG, PNG, PDF, CSV), and the charts of run reports.

Torch-free. `charts.mplstyle` has the rest of the look. On a page, COLORS become variables of its
style sheet, which follow the reader's light or dark setting. X marks the steps of a series.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.errors import printable
from foundation.files import atomic_write, make_directory
from foundation.tables import write_csv
from pretrain.reporting.run_history import History
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.rundir.history import setting_changes
from pretrain.rundir.metric_names import SMOOTHED_LOSS, STEP_LOSS, VALIDATION_LOSS, set_losses
from pretrain.rundir.metrics_file import parse_totals
from pretrain.terminal.text import distinguished, si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("charts.mplstyle")
# A single chart is narrow, so that its text is large enough on a phone 400 px wide.
CHART_WIDTH_INCHES = 4.6
PIXELS_PER_INCH, WIDEST_PIXELS = 113, 620  # the largest width of a chart on a page
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
SERIES = ("#4f83d6", "#d9772f", "#2f9e6e", "#a05bb5", "#c9a02b", "#d1495b", "#3aa0b8", "#86a03a")
# ... and from purple over blue and green to amber, for series that have one: each is lighter than
# the previous one, so that they can be told apart in grey, too ...
SPECTRUM = ("#5a2695", "#3550ab", "#1b77ac", "#229298", "#39a776", "#7fa841", "#bca828", "#efa63c")
# ... with a marker for each of a dozen.
MARKERS = "osD^vPX<>ph8"
# In decades: shorter logarithmic axes have the ticks of linear ones. Below: the most decades that
# an axis spans, and where within a decade it then has ticks.
SHORT_AXIS = 0.3
TICKS_OF_A_DECADE = (
    (0.7, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)),
    (2.2, (1.0, 2.0, 5.0)),
    (np.inf, (1.0,)),
)
DASHED = (0, (4, 3))
UNDRAWN = "_nolegend_"  # the label of lines that are neither in the legend nor in the CSV
SHOWN_PERCENT = 98  # percentile of the losses; a run's first losses above it are hidden
SMALLEST_NORM = 1e-12  # a logarithmic axis cannot show 0
# What a run had spent when a line of measurements was written; None where that is not known.
Spent = Callable[[History, Mapping[str, Any]], float | None]
Run = tuple[History, str]  # a run's history, and the name of its member


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

    # On matplotlib's defaults: others may have written a matplotlibrc into the working directory.
    matplotlib.rc_file(STYLE, use_default_template=True)
    figure = Figure(figsize=(CHART_WIDTH_INCHES, height_inches))
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def spread_colors(count: int) -> list[str]:
    """Return `count` different colors, in the order of the spectrum."""
    places = [i * (len(SPECTRUM) - 1) / max(1, count - 1) for i in range(count)]
    if count <= len(SPECTRUM):
        return [SPECTRUM[round(place)] for place in places]
    return [
        _blended(SPECTRUM[int(place)], SPECTRUM[math.ceil(place)], place % 1) for place in places
    ]


def member_colors(count: int) -> Sequence[str]:
    """Return the colors of members, in their order, the same in every figure."""
    return SERIES[:count] if count <= len(SERIES) else spread_colors(count)


def spread_markers(count: int) -> list[str]:
    """Return `count` markers, which repeat after a dozen."""
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
    """Write losses as 3.50 and not 3.5 x 10^0, all with the same decimals."""
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
    """Draw the legend above the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = _legend_columns(figure, labels, most_columns)
    position: Any = "outside upper center"
    figure.legend(handles, labels, loc=position, ncols=columns, frameon=False, title=title)


def _legend_columns(figure: Figure, labels: Sequence[str], most: int = 3) -> int:
    """Return how many columns of labels fit into the figure's width, at most `most`."""
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


def panel_figure(panel: Panel, height_inches: float) -> Figure:
    """Return the figure of one panel, higher by its legend."""
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
    return figure


def panel_html(panel: Panel, height_inches: float, directory: Path, about: str) -> str:
    """Return one panel as inline SVG; also write it to files in `directory`, named by its title."""
    figure = panel_figure(panel, height_inches)
    make_directory(directory)
    save_figure(
        directory / panel.title.lower().replace(" ", "-"), figure, f"{panel.title}: {about}"
    )
    x_label = figure.axes[0].get_xlabel()
    return chart_html(figure, f"{panel.title}: {panel.y_label} over {x_label}")


def save_figure(path: Path, figure: Figure, title: str) -> None:
    """Write a figure as PNG, SVG and PDF, with the title as metadata, and its points as CSV."""
    for form, unwanted in (("png", "Software"), ("svg", "Date"), ("pdf", "CreationDate")):
        with atomic_write(path.with_suffix(f".{form}")) as file:
            figure.savefig(file, format=form, metadata={unwanted: None, "Title": title})
    write_csv(path.with_suffix(".csv"), ("series", "x", "y"), drawn_values(figure))


def drawn_values(figure: Figure) -> list[dict[str, Any]]:
    """The points of all lines, marks and bands of a figure, with the names of their series."""
    rows = []
    for axes in figure.axes:
        series = [(str(line.get_label()), line.get_xydata()) for line in axes.lines]
        axis = str(axes.get_ylabel() or axes.get_title()).partition(",")[0].replace("\n", " ")
        for shape in axes.collections:
            offsets = np.asarray(shape.get_offsets())
            outlines = [path.vertices for path in shape.get_paths()]
            curves = [offsets] if len(offsets) > 1 else outlines
            series += [(str(shape.get_label()), np.asarray(curve)) for curve in curves]
        on_x, on_y = _tick_texts(axes.xaxis), _tick_texts(axes.yaxis)
        for number, (name, points) in enumerate(series, start=1):
            if name == UNDRAWN:
                continue
            # An underscore keeps a name out of the legend; matplotlib's own names have one, too.
            is_own = re.fullmatch(r"_(child)?\d+", name)
            shown = f"{axis} {number}" if is_own else name.lstrip("_").replace("\n", " ")
            rows += [
                {"series": shown, "x": on_x.get(x) or f"{x:.8g}", "y": on_y.get(y) or f"{y:.8g}"}
                for x, y in np.asarray(points, float)
                if math.isfinite(x) and math.isfinite(y)
            ]
    return rows


def _tick_texts(axis: Any) -> dict[float, str]:
    """Return position -> text of the ticks, where they have texts of their own."""
    texts = getattr(axis.get_major_formatter(), "seq", ())
    return dict(zip(axis.get_majorticklocs(), map(str, texts), strict=False))


def run_panels(history: History) -> list[Panel]:
    """The charts that this run has measurements for."""

    def has(name: str, lines: Sequence[Mapping[str, Any]]) -> bool:
        return any(line.get(name) is not None for line in lines)

    train, norm = history.train, "norm before clipping"
    has_sets = bool(set_losses(history.summary.evaluation))
    both = (map(line.get, ("loss", "loss_without_memory")) for line in history.measured.evaluations)
    has_memory = any(without not in (None, loss) for loss, without in both)
    has_layers = bool(history.layers("grad_norm"))
    norms, updates = (partial(_by_layer, kind) for kind in ("grad_norm", "update_ratio"))
    seconds = "seconds since the first start"
    charts: list[tuple[bool, str, str, str, Callable[[History, Axes], None]]] = [
        (True, "Loss", "step", "loss, nats per token", _loss),
        (has_sets, "Validation by corpus", "step", VALIDATION_LOSS, _losses_of_sets),
        (has_memory, "Value of the memory", "step", VALIDATION_LOSS, _value_of_memory),
        (has("tokens_per_second", train), "Speed", "step", "tokens per second", _speed),
        (has("grad_norm", train), "Gradients", "step", norm, _gradient_norm),
        (has("learning_rate", train), "Learning rate", "step", "learning rate", _learning_rate),
        (has_layers, "Gradients by layer", "step", norm, norms),
        (has_layers, "Updates by layer", "step", "update / weights", updates),
        (has("time", train), "Progress", seconds, "step", _progress),
    ]
    return [
        Panel(title, x_label, y_label, partial(draw, history))
        for is_measured, title, x_label, y_label, draw in charts
        if is_measured
    ]


def comparison_panels(histories: Sequence[History], members: Sequence[str]) -> list[Panel]:
    """Return losses over tokens, FLOPs and time, and speeds over steps, with a color per member."""
    loss, seconds = "loss, nats per token", "seconds of training"
    runs = list(zip(histories, members, strict=True))
    return [
        Panel("Loss", "tokens", loss, partial(_losses, runs, _tokens)),
        Panel("Loss over FLOPs", "training FLOPs", loss, partial(_losses, runs, _flops)),
        Panel("Loss over time", seconds, loss, partial(_losses, runs, _seconds)),
        Panel("Speed", "step", "tokens per second", partial(_speeds, runs)),
    ]


def _loss(history: History, axes: Axes) -> None:
    """Draw the step losses, these smoothed, validation losses, and marks of rewinds and skips."""
    steps_X, losses_X = history.series("loss")
    axes.plot(steps_X, losses_X, color=FIRST, linewidth=0.8, label=STEP_LOSS)
    smooth = {"color": SECOND, "linewidth": 1.6, "label": SMOOTHED_LOSS}
    axes.plot(*history.smooth_loss, **smooth)
    validated_X = _plot_by_text(history, axes, "loss", VALIDATION_LOSS, "o", INK)
    for number, event in enumerate(history.rewinds):
        label = "rewind" if number == 0 else None
        step = event.to_step
        axes.axvline(step, color=ALARM, linewidth=1.2, linestyle=DASHED, label=label)
    skipped = [line["step"] for line in history.train if line["skipped"]]
    if skipped:
        height, across = [0.97] * len(skipped), axes.get_xaxis_transform()  # below the upper edge
        axes.plot(
            skipped, height, "x", color=ALARM, markersize=6, label="skipped",
            transform=across,
        )  # fmt: skip
    _hide_the_first_losses(axes, [losses_X], validated_X)


def _plot_by_text(
    history: History, axes: Axes, name: str, label: str, form: str, color: str
) -> np.ndarray:
    """Draw a loss, a series for each text, hollow for others than the results'; return them."""
    drawn = [np.empty(0)]
    for text, lines in history.evaluations_by_text.items():
        is_other = text != history.text
        words = f", {EvaluatedText.of_line(lines[-1]).description}" * is_other
        steps_X, losses_X = history.series(name, lines)
        style = {"color": color, "markersize": 4, "fillstyle": "none" if is_other else "full"}
        axes.plot(steps_X, losses_X, form, label=label + words, **style)
        drawn.append(losses_X)
    return np.concatenate(drawn)


def _hide_the_first_losses(
    axes: Axes, trained: Sequence[np.ndarray], validated_X: np.ndarray
) -> None:
    """End the axis above all losses but those of the first steps, which would flatten the rest.

    The peak of a later spike is always shown, because a reader looks for it.
    """
    highest, lowest = -np.inf, np.inf
    for losses_X in trained:
        finite_X = losses_X[np.isfinite(losses_X)]
        if len(finite_X):
            after_fall = int(np.argmax(finite_X <= np.percentile(finite_X, SHOWN_PERCENT)))
            highest = max(highest, finite_X[after_fall:].max())
            lowest = min([lowest, finite_X.min(), *validated_X])
    if highest >= lowest:
        margin = highest - lowest
        axes.set_ylim(lowest - 0.05 * margin - 1e-3, highest + 0.1 * margin + 1e-3)


def _speed(history: History, axes: Axes) -> None:
    """Tokens per second of each interval."""
    steps_X, speeds_X = history.series("tokens_per_second")
    axes.plot(steps_X, speeds_X, color=SECOND, linewidth=1.4)
    axes.set_ylim(0, speeds_X.max() * 1.15 if len(speeds_X) else 1)


def _learning_rate(history: History, axes: Axes) -> None:
    """Draw the rate of each update, and the steps at which a resume changed settings of updates."""
    axes.plot(*history.series("learning_rate"), color=SECOND, linewidth=1.4)
    steps = {change.step for change in setting_changes(history.ledger)}
    for number, step in enumerate(sorted(steps)):
        label = None if number else "changed settings"
        axes.axvline(step, color=FAINT, linewidth=1.0, linestyle=DASHED, label=label)
    axes.set_ylim(bottom=0)


def _gradient_norm(history: History, axes: Axes) -> None:
    """Draw the norm before clipping, on a logarithmic axis, and the norm that it is clipped to."""
    steps_X, norms_X = history.series("grad_norm")
    axes.plot(steps_X, np.maximum(norms_X, SMALLEST_NORM), color=SECOND, linewidth=0.8)
    if clip := history.config.optim.clip_norm:
        axes.axhline(clip, color=FAINT, linewidth=1.0, linestyle=DASHED, label="clipped above")
    axes.set_yscale("log")
    log_ticks(axes.yaxis)


def _by_layer(kind: str, history: History, axes: Axes) -> None:
    """Draw a line per layer, colored by depth; parameters outside of layers have other colors."""
    colors = {"embedding": INK, "output": ALARM, "shared": FAINT}
    names = history.layers(kind)
    layers = [name for name in names if name not in colors]
    colors |= dict(zip(layers, spread_colors(len(layers)), strict=True))
    for name in names:
        steps_X, values_X = history.series(f"{kind}/{name}")
        positive_X, label = np.maximum(values_X, SMALLEST_NORM), name.replace(".", " ")
        alone = "o" if len(steps_X) == 1 else ""  # a line of one point shows nothing
        axes.plot(steps_X, positive_X, alone + "-", color=colors[name], linewidth=1.2, label=label)
    axes.set_yscale("log")
    log_ticks(axes.yaxis)


def _value_of_memory(history: History, axes: Axes) -> None:
    """Draw the validation loss with the memory of training and without memory."""
    both = [line for line in history.measured.evaluations if "loss_without_memory" in line]
    measured = replace(history, measured=replace(history.measured, evaluations=both))
    _plot_by_text(measured, axes, "loss_without_memory", "without memory", "o-", FAINT)
    _plot_by_text(measured, axes, "loss", "with memory", "o-", SECOND)


def _losses_of_sets(history: History, axes: Axes) -> None:
    """Draw the validation loss, and the loss of each set in a color of its own."""
    style = {"marker": "o", "markersize": 3.5, "linewidth": 1.4}
    whole = history.series("loss", history.evaluations)
    axes.plot(*whole, color=INK, label=VALIDATION_LOSS, **style)
    measured = {name: None for line in history.evaluations for name in set_losses(line)}
    for number, name in enumerate(measured):
        points = [
            (line["step"], losses[name])
            for line in history.evaluations
            if name in (losses := set_losses(line))
        ]
        steps_X, losses_X = np.array(points, float).reshape(-1, 2).T
        color = SERIES[number % len(SERIES)]
        axes.plot(steps_X, losses_X, color=color, label=printable(name), **style)


def _progress(history: History, axes: Axes) -> None:
    """Draw the step over the time since the first start, marking failed attempts and rewinds."""
    seconds_X, steps_X = history.progress
    units = (("hours", 3600, 7200), ("minutes", 60, 180), ("seconds", 1, -np.inf))
    unit, divisor = next((unit, size) for unit, size, least in units if seconds_X[-1] > least)
    axes.plot(seconds_X / divisor, steps_X, color=SECOND, linewidth=1.6)
    failed_X, reached_X = history.setbacks
    if len(failed_X):
        label = "failed attempt or rewind"
        axes.plot(failed_X / divisor, reached_X, "x", color=ALARM, markersize=7, label=label)
    axes.set_xlabel(f"{unit} since the first start")


def _losses(runs: Sequence[Run], spent: Spent, axes: Axes) -> None:
    """Draw smoothed losses over what was spent, and validation losses as dots, a color per member.

    Several seeds of a member are drawn as their means after equal steps, in a band from the lowest
    loss to the highest. There are no dots if the runs were scored on different texts.
    """
    has_dots = len({history.text for history, _ in runs}) == 1
    for name, color, histories in _members(runs):
        curves = []
        for history in histories:
            points = [(line["step"], spent(history, line)) for line in history.train]
            known = [(0, 0), *((step, amount) for step, amount in points if amount is not None)]
            spent_at = partial(np.interp, xp=[step for step, _ in known], fp=[x for _, x in known])
            steps_X, losses_X = history.smooth_loss
            curves.append((steps_X, spent_at(steps_X), losses_X))
            if history.evaluations and has_dots:
                steps_X, losses_X = history.series("loss", history.evaluations)
                label = f"_{printable(history.path.name)} {VALIDATION_LOSS}"
                style = {"color": color, "markersize": 3.5, "label": label}
                axes.plot(spent_at(steps_X), losses_X, "o", **style)
        _, x_X, losses_X = curves[0]
        if len(curves) > 1:
            first, last = max(c[0][0] for c in curves), min(c[0][-1] for c in curves)
            steps_X = np.linspace(first, last, 200)
            x_X = np.mean([np.interp(steps_X, steps, x) for steps, x, _ in curves], 0)
            losses_SX = np.stack([np.interp(steps_X, steps, y) for steps, _, y in curves])
            losses_X, lowest_X, highest_X = losses_SX.mean(0), losses_SX.min(0), losses_SX.max(0)
            band = {"color": color, "alpha": 0.2, "linewidth": 0, "label": f"_{name} seeds"}
            axes.fill_between(x_X, lowest_X, highest_X, **band)
        axes.plot(x_X, losses_X, color=color, linewidth=1.6, label=name)
    validated = [h.series("loss", h.evaluations)[1] for h, _ in runs if has_dots]
    trained = [history.smooth_loss[1] for history, _ in runs]
    _hide_the_first_losses(axes, trained, np.concatenate([[], *validated]))


def _members(runs: Sequence[Run]) -> Iterator[tuple[str, str, list[History]]]:
    """Yield each member's name, its color and its runs, in the order of the members."""
    names = list(dict.fromkeys(member for _, member in runs))
    colors = member_colors(len(names))
    for member, name, color in zip(names, distinguished(names), colors, strict=True):
        yield name, color, [history for history, of_run in runs if of_run == member]


def _tokens(history: History, line: Mapping[str, Any]) -> float | None:
    """Return how many tokens the run had read when the line was written."""
    return line["tokens"]


def _flops(history: History, line: Mapping[str, Any]) -> float | None:
    """Return the training FLOPs until the line, at the run's mean of FLOPs per token."""
    return (history.results.flops or 0) * line["tokens"] / max(history.tokens, 1)


def _seconds(history: History, line: Mapping[str, Any]) -> float | None:
    """Return how long the run had trained, without evaluations; None inside of an interval."""
    totals = parse_totals(line)
    return None if totals is None else totals.steps


def _speeds(runs: Sequence[Run], axes: Axes) -> None:
    """Tokens per second over steps, a color per member."""
    for name, color, histories in _members(runs):
        for history in histories:
            label = name if history is histories[0] else f"_{printable(history.path.name)}"
            style = {"color": color, "linewidth": 1.4, "label": label}
            axes.plot(*history.series("tokens_per_second"), **style)
    axes.set_ylim(bottom=0)
