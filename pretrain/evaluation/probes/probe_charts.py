"""The pictures of the probes. X bins of distances or positions, on an axis of powers of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from pretrain.evaluation.probes.attention_mass import AttentionMass
from pretrain.evaluation.probes.distances import Borders
from pretrain.evaluation.probes.document_position import PositionLoss
from pretrain.evaluation.probes.recall import Recall
from pretrain.reporting.charts import (
    PAGE,
    SERIES,
    canvas,
    chart_html,
    legend_above,
    spread_colors,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHED, DOTTED, DASH_DOTTED = (0, (4, 3)), (0, (1, 2)), (0, (5, 2, 1, 2))
MOST_TICKS = 11
MOST_LAYERS_NAMED = 6
HEAD_INCHES, LEAST_INCHES, MOST_INCHES = 0.13, 1.6, 7.0


def place_of(distance: float) -> float:
    """Return where a distance is on the axis: 0, then 1 for 1, 2 for 2, 3 for 4, and so on."""
    return max(distance, 0.0) if distance < 1 else 1.0 + math.log2(distance)


def recall_chart(
    name: str, recalls: Sequence[Recall], borders: Borders, effective_context: int
) -> str:
    """Return accuracy over distance, with intervals, chance, and the borders of what is seen."""
    figure, axes = canvas(PAGE, 2.6, "distance d (tokens)", "recalled")
    places = [place_of(each.distance) for each in recalls]
    values = [each.accuracy for each in recalls]
    below = [max(0.0, each.accuracy - each.low) for each in recalls]
    above = [max(0.0, each.high - each.accuracy) for each in recalls]
    axes.errorbar(
        places, values, yerr=[below, above], fmt="o-", color=PAGE.second, markersize=4,
        linewidth=1.6, elinewidth=1.2, capsize=2.5, label="recalled, 95% interval",
    )  # fmt: skip
    axes.axhline(recalls[0].chance, color=PAGE.faint, linewidth=1.2, label="chance")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(places[0] - 0.2, places[-1] + 0.2)
    _mark_borders(axes, borders, effective_context)
    _power_ticks(axes, math.floor(places[0]), math.ceil(places[-1]))
    legend_above(figure, axes, PAGE, "")
    return chart_html(figure, f"{name}: accuracy over distance")


def position_chart(losses: Sequence[PositionLoss], borders: Borders, effective_context: int) -> str:
    """Return loss over the position in the document, a line per memory length."""
    figure, axes = canvas(PAGE, 2.6, "position in the document (tokens)", "loss, nats per token")
    styles = zip(losses, (PAGE.second, SERIES[1]), ("o-", "s--"), strict=False)
    for each, color, style in styles:
        filled = [number for number, count in enumerate(each.tokens) if count]
        places = [number + 0.5 for number in filled]
        values = [each.losses[number] for number in filled]
        margins = [each.margins[number] or 0.0 for number in filled]
        low, high = (
            [value + sign * margin for value, margin in zip(values, margins, strict=True)]
            for sign in (-1, 1)
        )
        words = f"memory {each.memory_length:,}" if each.memory_length else "no memory"
        axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(places, values, style, color=color, markersize=4, linewidth=1.6, label=words)
    num_bins = max(len(each.tokens) for each in losses)
    axes.set_xlim(0, num_bins)
    _mark_borders(axes, borders, effective_context)
    _power_ticks(axes, 0, num_bins)
    legend_above(figure, axes, PAGE, "")
    return chart_html(figure, "Loss over the position in the document")


def mass_chart(attention: AttentionMass, borders: Borders, effective_context: int) -> str:
    """Return the mean mass of a layer's heads over distance, a line per layer."""
    figure, axes = canvas(PAGE, 2.6, "distance of the key", "attention in the bin")
    totals = attention.total()
    colors = spread_colors(len(totals))
    for layer, (heads, color) in enumerate(zip(totals, colors, strict=True)):
        means = [fmean(values) for values in zip(*heads, strict=True)]
        places = [number + 0.5 for number in range(len(means))]
        is_named = len(totals) <= MOST_LAYERS_NAMED or layer in (0, len(totals) - 1)
        label = f"layer {attention.layers[layer]}" if is_named else None
        axes.plot(places, means, "o-", color=color, markersize=3, linewidth=1.4, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(0, len(attention.first_distances))
    _mark_borders(axes, borders, effective_context)
    _power_ticks(axes, 0, len(attention.first_distances))
    legend_above(figure, axes, PAGE, "")
    return chart_html(figure, "Attention by distance, a line per layer")


def heads_chart(attention: AttentionMass, borders: Borders) -> str:
    """Return a row of cells per head, darker where there is more of its attention."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    totals = attention.total()
    rows = [head for layer in totals for head in layer]
    height = min(MOST_INCHES, max(LEAST_INCHES, 0.7 + HEAD_INCHES * len(rows)))
    figure, axes = canvas(PAGE, height, "distance of the key", "layer")
    axes.grid(visible=False)
    highest = largest_cell(attention)
    squares, colors = [], []
    for row, cells in enumerate(rows):
        for number, value in enumerate(cells):
            right, below = number + 1, row + 1
            squares.append([(number, row), (right, row), (right, below), (number, below)])
            colors.append(to_rgba(PAGE.second, round(value / highest, 3)))
    axes.add_collection(PolyCollection(squares, facecolors=colors, linewidths=0))
    per_layer = len(totals[0])
    for layer in range(1, len(totals)):
        axes.axhline(layer * per_layer, color=PAGE.surface, linewidth=2.5)
    step = -(-len(totals) // MOST_TICKS)
    places = [(layer + 0.5) * per_layer for layer in range(0, len(totals), step)]
    axes.set_yticks(places, [str(number) for number in attention.layers[::step]])
    axes.set_ylim(len(rows), 0)
    axes.set_xlim(0, len(attention.first_distances))
    _mark_borders(axes, borders, 0)
    _power_ticks(axes, 0, len(attention.first_distances))
    legend_above(figure, axes, PAGE, "")
    return chart_html(figure, "Attention by distance, a row of cells per head")


def largest_cell(attention: AttentionMass) -> float:
    """Return the share of attention that the darkest cell stands for."""
    return max(value for layer in attention.total() for head in layer for value in head)


def layers_chart(
    layers: Sequence[int],
    values: Sequence[Sequence[float]],
    y_label: str,
    limit: float,
    limit_label: str,
    form: str,
) -> str:
    """Return a dot per head and the mean of each of the layers, below a limit."""
    figure, axes = canvas(PAGE, 2.1, "layer", y_label)
    dots = [(layer, value) for layer, heads in zip(layers, values, strict=True) for value in heads]
    axes.plot(*zip(*dots, strict=True), "o", color=PAGE.second, alpha=0.45, markersize=5,
              label="a head", markeredgewidth=0)  # fmt: skip
    means = [fmean(heads) for heads in values]
    axes.plot(layers, means, "s-", color=SERIES[1], markersize=4, linewidth=1.4,
              label="mean of the layer")  # fmt: skip
    axes.axhline(limit, color=PAGE.faint, linestyle=DASHED, linewidth=1.2, label=limit_label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(form)
    axes.set_xticks(layers[:: -(-len(values) // MOST_TICKS)])
    axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    legend_above(figure, axes, PAGE, "")
    return chart_html(figure, f"{y_label} by layer")


def _mark_borders(axes: Axes, borders: Borders, effective_context: int) -> None:
    """Draw the borders that are within the axis as lines, with names for the legend."""
    lines = (
        (borders.segment, "segment", SERIES[2], DASHED),
        (borders.direct, "segment + memory", SERIES[5], DASH_DOTTED),
        (borders.total, "all layers", SERIES[3], DOTTED),
        (effective_context, "RECL", SERIES[4], "-"),
    )
    low, high = axes.get_xlim()
    marked = set()
    for distance, label, color, style in lines:
        if distance and distance not in marked and low < place_of(distance) <= high:
            place = place_of(distance)
            axes.axvline(place, color=color, linestyle=style, linewidth=1.4, label=label,
                         clip_on=False, zorder=1)  # fmt: skip
            if label != "RECL":  # which may be the same as a border
                marked.add(distance)


def _power_ticks(axes: Axes, first: int, last: int) -> None:
    step = -(-(last - first + 1) // MOST_TICKS)
    places = range(first, last + 1, step)
    texts = [str((1 << place) >> 1) for place in places]
    axes.set_xticks(list(places), texts)
