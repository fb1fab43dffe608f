"""The probes of a model as one self-contained page.

The pictures of the probes. X bins of distances or positions, on an axis of powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from pretrain.evaluation.probes.attention_mass import AttentionMass
from pretrain.evaluation.probes.distances import Borders, bin_names
from pretrain.evaluation.probes.document_position import PositionLoss
from pretrain.evaluation.probes.probe_run import ProbeResults, mean_of
from pretrain.evaluation.probes.recall import Recall, recall_distance
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
from pretrain.reporting.html import Card, page, paragraph, section, table
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


def layers_chart(
    layers: Sequence[int],
    values: Sequence[Sequence[float]],
    y_label: str,
    limit: float,
    limit_label: str,
    form: str,
) -> str:
    """Return a dot per head and the mean of each of the layers, below a limit."""
    figure, axes = canvas(2.1, "layer", y_label)
    dots = [(layer, value) for layer, heads in zip(layers, values, strict=True) for value in heads]
    axes.plot(*zip(*dots, strict=True), "o", color=SECOND, alpha=0.45, markersize=5,
              label="a head", markeredgewidth=0)  # fmt: skip
    means = [fmean(heads) for heads in values]
    axes.plot(layers, means, "s-", color=SERIES[1], markersize=4, linewidth=1.4,
              label="mean of the layer")  # fmt: skip
    axes.axhline(limit, color=FAINT, linestyle=DASHED, linewidth=1.2, label=limit_label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(form)
    axes.set_xticks(layers[:: -(-len(values) // MOST_TICKS)])
    axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    legend_above(figure, axes)
    return chart_html(figure, f"{y_label} by layer")


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


def render(name: str, results: ProbeResults) -> str:
    """Return the whole page."""
    settings, borders = results.settings, results.borders
    recl = results.context.length if results.context else 0
    lead = (
        f"Step {results.step:,}. Read in segments of {settings.segment_length:,} tokens with a "
        f"memory of {settings.memory_length:,}. {_reach(borders)}."
    )
    sections = [_recall(kind, found, borders, recl) for kind, found in results.recalls.items()]
    if results.position:
        sections.append(_position(results.position, borders, recl))
    if results.attention is not None:
        sections += _attention(results.attention, borders, recl)
    source = f"text and frequent tokens of {results.text}" if results.text else (
        "ids from all over the vocabulary"
    )  # fmt: skip
    footer = (
        f"Written by 'pretrain evaluate --probe' with {source}; "
        f"{settings.trials} trials at each distance. How to read it: docs/evaluation.md. All "
        "numbers: probes.json."
    )
    return page(name, "Probes of memory", lead, _cards(results), sections, footer)


def _cards(results: ProbeResults) -> list[Card]:
    cards = []
    for kind, found in results.recalls.items():
        reached, longest = recall_distance(found), found[-1].distance
        words = (
            f"tokens: up to this distance, recall of the {kind} is at least 50% and above chance"
        )
        if reached == longest:
            words += "; no longer one was tested"
        if not reached:
            after = f"{found[0].distance} tokens later"
            words = f"recall of the {kind} is below 50% or at chance {after}"
        cards.append(Card(f"{reached:,}" if reached else "none", words))
    if len(results.position) == 2:
        with_memory, without = results.position
        gain = without.losses[-1] - with_memory.losses[-1]
        last = bin_names(with_memory.first_positions)[-1]
        words = f"how much higher the loss is without memory at positions {last} of a document"
        cards.append(Card(f"{gain:+.4f}", words))
    if (attention := results.attention) is not None:
        share = mean_of(attention.share("memory")) + mean_of(attention.share("compressed"))
        cards.append(Card(f"{share:.0%}", "of the attention is on memory, the mean of all heads"))
    if (context := results.context) is not None:
        length = f"{context.length:,}{'+' if context.reached_longest else ''}"
        cards.append(Card(length, "effective context length (RECL) of this model alone, in tokens"))
    return cards


def _recall(kind: str, found: Sequence[Recall], borders: Borders, recl: int) -> str:
    title, words = RECALL_WORDS[kind]
    chance = (
        f"By chance {found[0].chance:.1%} are recalled, at a loss of {found[0].chance_loss:.3f}"
    )
    heads = ["distance", "recalled", "95% interval", "loss"]
    rows = [
        [
            f"{each.distance:,}",
            f"{each.accuracy:.1%}",
            f"{each.low:.1%} to {each.high:.1%}",
            f"{each.loss:.3f}",
        ]
        for each in found
    ]
    return section(
        title,
        paragraph(words),
        recall_chart(title, found, borders, recl),
        paragraph(f"{chance} nats. {_border_words(borders)}"),
        table(heads, rows),
    )


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


def _position(losses: Sequence[PositionLoss], borders: Borders, recl: int) -> str:
    words = (
        "The mean loss of tokens by how many of their document are before them. It falls as far "
        "as context helps; the gap between the lines is what the memory is worth. Bands are 95% "
        "intervals as if tokens did not depend on each other."
    )
    first = losses[0]
    heads = ["position", "tokens"]
    heads += [f"memory {each.memory_length:,}" for each in losses]
    rows = [
        [name, f"{first.tokens[number]:,}", *(f"{each.losses[number]:.4f}" for each in losses)]
        for number, name in enumerate(bin_names(first.first_positions))
    ]
    rows.append(["all", f"{sum(first.tokens):,}", *(f"{each.loss:.4f}" for each in losses)])
    chart = position_chart(losses, borders, recl)
    return section("Loss by document position", paragraph(words), chart, table(heads, rows))


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
    memory, compressed = (attention.share(part) for part in ("memory", "compressed"))
    older = [
        [one + two for one, two in zip(*pair, strict=True)]
        for pair in zip(memory, compressed, strict=True)
    ]
    entropy = (
        "Low: a head looks at few keys. At the dashed line it looks at all keys it can see "
        "alike; exp(entropy) is about the number of keys it uses."
    )
    layers = attention.layers
    share = layers_chart(layers, older, "attention to memory", 1.0, "all of it", "{x:.0%}")
    limit = attention.uniform_entropy
    dots = layers_chart(layers, attention.entropy, "entropy, nats", limit, "equal weights", "{x:g}")
    heads = ["layer", "to memory", "mean distance", "entropy", "keys used"]
    table_rows = [
        [
            str(number),
            f"{fmean(older[layer]):.1%}",
            f"{fmean(attention.mean_distance[layer]):,.1f}",
            f"{fmean(attention.entropy[layer]):.2f}",
            f"{fmean(map(math.exp, attention.entropy[layer])):,.1f}",
        ]
        for layer, number in enumerate(layers)
    ]
    return [
        section("Attention by distance", paragraph(words), mass_chart(attention, borders, recl)),
        section("Attention of every head", paragraph(cells), heads_chart(attention, borders)),
        section("Attention to memory", paragraph("The rest is on the segment itself."), share),
        section("Entropy of attention", paragraph(entropy), dots, table(heads, table_rows)),
    ]
