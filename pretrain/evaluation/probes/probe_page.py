"""The probes of a model as one self-contained page.

The pictures of the probes. X bins of distances or positions, on an axis of powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from pretrain.evaluation.probes.attention_mass import AttentionMass
from pretrain.evaluation.probes.distances import Borders
from pretrain.evaluation.probes.document_position import PositionLoss
from pretrain.evaluation.probes.probe_run import ProbeResults, probe_rows
from pretrain.evaluation.probes.recall import Recall
from pretrain.reporting.charts import (
    FAINT,
    SECOND,
    SERIES,
    SURFACE,
    canvas,
    chart_html,
    legend_above,
    spread_colors,
)
from pretrain.reporting.html import page, paragraph, section, table
from pretrain.terminal.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHED, DOTTED, DASH_DOTTED = (0, (4, 3)), (0, (1, 2)), (0, (5, 2, 1, 2))
MOST_TICKS = 11
MARGIN = 0.2  # of a power of two, beside points at the ends of an axis
MOST_LAYERS_NAMED = 6
HEAD_INCHES, LEAST_INCHES, MOST_INCHES = 0.13, 1.6, 7.0


def place_of(distance: float) -> float:
    """Return where a distance is on the axis: 0, then 1 for 1, 2 for 2, 3 for 4, and so on."""
    return max(distance, 0.0) if distance < 1 else 1.0 + math.log2(distance)


def recall_chart(
    name: str, recalls: Sequence[Recall], borders: Borders, effective_context: int
) -> str:
    """Return accuracy over distance, with intervals, chance, and the borders of what is seen."""
    figure, axes = canvas(2.6, "distance d (tokens)", "recalled")
    places = [place_of(each.distance) for each in recalls]
    values = [each.accuracy for each in recalls]
    below = [max(0.0, each.accuracy - each.low) for each in recalls]
    above = [max(0.0, each.high - each.accuracy) for each in recalls]
    axes.errorbar(
        places, values, yerr=[below, above], fmt="o-", color=SECOND, markersize=4,
        linewidth=1.6, elinewidth=1.2, capsize=2.5, label="recalled, 95% interval",
    )  # fmt: skip
    axes.axhline(recalls[0].chance, color=FAINT, linewidth=1.2, label="chance")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(places[0] - MARGIN, places[-1] + MARGIN)
    title = f"{name}: accuracy over distance"
    return _by_distance(figure, axes, borders, effective_context, title)


def position_chart(losses: Sequence[PositionLoss], borders: Borders, effective_context: int) -> str:
    """Return loss over the position in the document, a line per memory length."""
    figure, axes = canvas(2.6, "position in the document (tokens)", "loss, nats per token")
    styles = zip(losses, (SECOND, SERIES[1]), ("o-", "s--"), strict=False)
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
    axes.set_xlim(0, max(len(each.tokens) for each in losses))
    title = "Loss over the position in the document"
    return _by_distance(figure, axes, borders, effective_context, title)


def mass_chart(attention: AttentionMass, borders: Borders, effective_context: int) -> str:
    """Return the mean mass of a layer's heads over distance, a line per layer."""
    figure, axes = canvas(2.6, "distance of the key", "attention in the bin")
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
    title = "Attention by distance, a line per layer"
    return _by_distance(figure, axes, borders, effective_context, title)


def heads_chart(attention: AttentionMass, borders: Borders) -> str:
    """Return a row of cells per head, darker where there is more of its attention."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    totals = attention.total()
    rows = [head for layer in totals for head in layer]
    height = min(MOST_INCHES, max(LEAST_INCHES, 0.7 + HEAD_INCHES * len(rows)))
    figure, axes = canvas(height, "distance of the key", "layer")
    axes.grid(visible=False)
    highest = largest_cell(attention)
    squares, colors = [], []
    for row, cells in enumerate(rows):
        for number, value in enumerate(cells):
            right, below = number + 1, row + 1
            squares.append([(number, row), (right, row), (right, below), (number, below)])
            colors.append(to_rgba(SECOND, round(value / highest, 3)))
    axes.add_collection(PolyCollection(squares, facecolors=colors, linewidths=0))
    per_layer = len(totals[0])
    for layer in range(1, len(totals)):
        axes.axhline(layer * per_layer, color=SURFACE, linewidth=2.5)
    step = -(-len(totals) // MOST_TICKS)
    places = [(layer + 0.5) * per_layer for layer in range(0, len(totals), step)]
    axes.set_yticks(places, [str(number) for number in attention.layers[::step]])
    axes.set_ylim(len(rows), 0)
    axes.set_xlim(0, len(attention.first_distances))
    title = "Attention by distance, a row of cells per head"
    return _by_distance(figure, axes, borders, 0, title)


def largest_cell(attention: AttentionMass) -> float:
    """Return the share of attention that the darkest cell stands for."""
    return max(value for layer in attention.total() for head in layer for value in head)


def _by_distance(
    figure: Figure, axes: Axes, borders: Borders, effective_context: int, title: str
) -> str:
    """Return the chart with ticks at powers of two and lines at the borders within the axis."""
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
    first, last = math.floor(low + MARGIN + 1e-9), math.ceil(high - MARGIN - 1e-9)
    places = range(first, last + 1, -(-(last - first + 1) // MOST_TICKS))
    axes.set_xticks(list(places), [str((1 << place) >> 1) for place in places])
    legend_above(figure, axes)
    return chart_html(figure, title)


RECALL_WORDS = {
    "needle": (
        "Needle in text",
        "A key of four tokens and a value are read in text. After other text comes the key again: "
        "is the value the next token? Scored is the most likely of the candidates, so that chance "
        "is known.",
    ),
    "copy": (
        "Copy of random tokens",
        "Eight random tokens are read, then others, then the eight again: is each of them but the "
        "first predicted from the one before it? Nothing but recall helps.",
    ),
}
POSITION_WORDS = (
    "The mean loss of tokens by how many of their document are before them. It falls as far as "
    "context helps; the gap between the lines is what the memory is worth. Bands are 95% intervals "
    "as if tokens did not depend on each other."
)


def render(name: str, results: ProbeResults) -> str:
    """Return the whole page."""
    settings, borders = results.settings, results.borders
    recl = results.context.length if results.context else 0
    lead = (
        f"Step {results.step:,}. Read in segments of {settings.segment_length:,} tokens with a "
        f"memory of {settings.memory_length:,}. {_reach(borders)}."
    )
    sections = [
        section(
            (title := RECALL_WORDS[kind][0]),
            paragraph(RECALL_WORDS[kind][1]),
            recall_chart(title, found, borders, recl),
            paragraph(_border_words(borders)),
        )
        for kind, found in results.recalls.items()
    ]
    if results.position:
        chart = position_chart(results.position, borders, recl)
        sections.append(section("Loss by document position", paragraph(POSITION_WORDS), chart))
    if results.attention is not None:
        sections += _attention(results.attention, borders, recl)
    heads, *rows = probe_rows(results)
    sections.append(section("Numbers", table(heads, rows, "named")))
    source = "ids from all over the vocabulary"
    if results.text:
        source = f"text and frequent tokens of {results.text}"
    footer = (
        f"Written by 'pretrain evaluate --probe' with {source}; "
        f"{settings.trials} trials at each distance. How to read it: docs/evaluation.md. All "
        "numbers: probes.json."
    )
    return page(name, "Probes of memory", lead, [], sections, footer)


def _reach(borders: Borders) -> str:
    seen = f"One layer sees {borders.direct:,} tokens back"
    if not borders.total:
        return f"{seen}; states carry on what came before, without a limit"
    all_layers = "all layers together depend on" if borders.total > borders.direct else "in all"
    return f"{seen}; {all_layers} {borders.total:,} at most"


def _border_words(borders: Borders) -> str:
    words = (
        f"Up to the segment's {borders.segment:,} tokens, both occurrences may be in one segment"
    )
    if borders.direct != borders.segment:
        words += f"; up to {borders.direct:,}, one layer can look back through its memory"
    if borders.total > borders.direct:
        words += "; beyond that, layers have to pass it on"
    if not borders.total:
        return f"{words}. States can pass it on from any distance."
    return f"{words}. After more than {borders.total:,} tokens there is only chance."


def _attention(attention: AttentionMass, borders: Borders, recl: int) -> list[str]:
    rows = f"{counted(attention.memory_length, 'row')} of memory"
    if attention.compressed_length:
        rows += f" and {attention.compressed_length:,} compressed ones, each counted as one key"
    words = (
        f"Where the weights of {attention.queries:,} queries are, with {rows}. Each point is the "
        "share on the keys from the mark before it to the next one."
    )
    cells = (
        f"A row of cells for each head. The darkest cell is {largest_cell(attention):.0%} of a "
        "head's attention; dark cells on the right are heads that look far back."
    )
    return [
        section("Attention by distance", paragraph(words), mass_chart(attention, borders, recl)),
        section("Attention of every head", paragraph(cells), heads_chart(attention, borders)),
    ]
