"""The losses of a rate sweep as one HTML page, with its chart as a PNG beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pretrain.reporting.charts import (
    PAGE,
    PRINT,
    Palette,
    canvas,
    chart_html,
    legend,
    plain_ticks,
    save_png,
    spread_colors,
)
from pretrain.reporting.html import Card, page, paragraph, section, table
from pretrain.reporting.page_files import write_page
from pretrain.scaling.charts import LOSS
from pretrain.scaling.intervals import amount
from pretrain.scaling.parabola import parabola_through
from pretrain.scaling.tune import Tuned, tuned_table, verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_POINTS = 60
MOST_TICKS = 10


def loss_by_rate(found: Sequence[Tuned], palette: Palette) -> Figure:
    """Final losses over the learning rate, with a parabola and its vertex per batch size."""
    figure, axes = canvas(palette, 3.6, "peak learning rate", LOSS)
    for item, color in zip(found, spread_colors(len(found)), strict=True):
        label = amount(item.tokens_per_step)
        axes.plot(item.rates_S, item.loss_S, "o", color=color, markersize=4, label=label)
        if (best := item.optimum).is_known:
            rates_S, loss_S = item.rates_S[item.near_S], item.loss_S[item.near_S]
            drawn = np.geomspace(rates_S.min(), rates_S.max(), CURVE_POINTS)
            curve = parabola_through(np.log(rates_S), loss_S, np.log(drawn))
            axes.plot(drawn, curve, "-", color=color, linewidth=1.2)
            axes.plot([best.rate.value], [best.loss], "*", color=palette.ink, markersize=9)
            axes.axvspan(best.low, best.high, color=color, alpha=0.08, linewidth=0)
    axes.set_xscale("log")
    _rate_ticks(axes, sorted({float(rate) for item in found for rate in item.rates_S}))
    plain_ticks(axes.yaxis)
    legend(axes, palette, title="tokens per step")
    return figure


def _rate_ticks(axes: Axes, rates: Sequence[float]) -> None:
    """Ticks at the rates tried, but for those whose labels would overlap."""
    from matplotlib.ticker import NullLocator

    apart = (rates[-1] / rates[0]) ** (1 / MOST_TICKS)
    shown: list[float] = []
    for rate in rates:
        if not shown or rate >= shown[-1] * apart:
            shown.append(rate)
    axes.set_xticks(shown, [f"{rate:g}" for rate in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def write_tune_report(found: Sequence[Tuned], runs: Path, directory: Path, title: str) -> Path:
    """Write report.html, about `runs`, with tune.png beside it; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    caption = "Loss at the end over the peak learning rate"
    if any(item.optimum.is_known for item in found):
        caption += "; star: the lowest point of the parabola through the rates near it, shaded: "
        caption += "what loses at most 0.5%"
    save_png(directory / "tune.png", loss_by_rate(found, PRINT))
    heads, *rows = tuned_table(found)
    body = section(
        "Losses",
        chart_html(loss_by_rate(found, PAGE), caption) + paragraph(f"{caption}."),
        table(heads, rows, "named"),
        *(paragraph(line + ".") for line in verdicts(found)),
    )
    count = sum(len(item.loss_S) for item in found)
    lead = f"{count} runs of one model over as many tokens, at different learning rates."
    footer = "Written by 'pretrain scale tune report'. Losses in nats per token of the validation "
    path = directory / "report.html"
    text = page(title, "Learning rates", lead, _cards(found), [body], f"{footer}split.")
    write_page(path, text, [runs])
    return path


def _cards(found: Sequence[Tuned]) -> list[Card]:
    return [
        Card(
            f"{item.optimum.rate.value:.2g}",
            f"best rate at {amount(item.tokens_per_step)} tokens a step",
        )
        for item in found
        if item.optimum.is_known
    ]
