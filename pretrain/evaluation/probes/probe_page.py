"""The probes of a model as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from pretrain.evaluation.probes.attention_mass import AttentionMass
from pretrain.evaluation.probes.distances import Borders, bin_names
from pretrain.evaluation.probes.document_position import PositionLoss
from pretrain.evaluation.probes.probe_charts import (
    heads_chart,
    largest_cell,
    layers_chart,
    mass_chart,
    position_chart,
    recall_chart,
)
from pretrain.evaluation.probes.probe_run import ProbeResults, mean_of
from pretrain.evaluation.probes.recall import Recall, recall_distance
from pretrain.reporting.html import Card, page, paragraph, section, table
from pretrain.terminal.text import counted

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


def render(name: str, step: int, results: ProbeResults) -> str:
    """Return the whole page."""
    settings, borders = results.settings, results.borders
    recl = results.context.length if results.context else 0
    lead = (
        f"Step {step:,}. Read in segments of {settings.segment_length:,} tokens with a memory of "
        f"{settings.memory_length:,}. {_reach(borders)}."
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
        f"Written by 'pretrain evaluate --probe' with {source}; seed {settings.seed}, "
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
