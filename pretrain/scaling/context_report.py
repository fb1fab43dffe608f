"""The losses of a context sweep as one self-contained HTML file, its pictures beside it as PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.files import write_text
from pretrain.reporting.charts import PAGE, PRINT, Palette, chart_html, save_png
from pretrain.reporting.html import Card, page, paragraph, section, table
from pretrain.scaling import context_charts
from pretrain.scaling.context_table import ContextRow
from pretrain.scaling.wording import amount

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES = {  # attribute of a row -> title, what is equal in words
    "same_tokens": (
        "Equal tokens",
        "All runs: the same model and tokens; a longer context costs more FLOPs",
    ),
    "same_flops": (
        "Equal FLOPs",
        "All runs: the same model and FLOPs; a longer context reads fewer tokens",
    ),
}


def write_context_report(rows: Sequence[ContextRow], directory: Path, title: str) -> Path:
    """Write report.html and the PNGs into `directory`; returns the HTML's path."""
    directory.mkdir(parents=True, exist_ok=True)
    sections = [_series(rows, name, directory) for name in SERIES if _trained(rows, name)]
    sections.append(_evaluated(rows, directory))
    sizes = sorted({int(row.N) for row in rows})
    lead = (
        f"{len({row.name for row in rows})} runs of {' and '.join(amount(size) for size in sizes)} "
        "parameters that differ in segment and memory length only, evaluated with memories of 0 to 8 times their own."
    )
    path = directory / "report.html"
    footer = "Written by 'pretrain scale context report'. Losses in nats per token of the validation split."
    write_text(path, page(title, "Context lengths", lead, _cards(rows), sections, footer))
    return path


def _series(rows: Sequence[ContextRow], name: str, directory: Path) -> str:
    title, words = SERIES[name]
    mine = _trained(rows, name)
    caption = f"Loss over memory length, one line per segment length. {words}"
    cells = [
        [str(row.segment_length), str(row.memory_length), amount(float(row.D)), f"{row.C:.3g}",
         f"{row.loss:.4f}"]
        for row in sorted(mine, key=lambda row: float(row.loss))
    ]  # fmt: skip
    return section(
        title,
        _drawn(
            directory / f"{name}.png",
            lambda palette: context_charts.loss_by_memory(mine, palette),
            caption,
        ),
        table(["segment", "memory", "tokens", "FLOPs", "loss"], cells),
    )


def _evaluated(rows: Sequence[ContextRow], directory: Path) -> str:
    shown = [row for row in rows if row.same_tokens] or list(rows)
    times = sorted({float(row.times) for row in shown})
    names = list(dict.fromkeys(row.name for row in shown))
    losses = {(row.name, float(row.times)): f"{row.loss:.4f}" for row in shown}
    cells = [[name, *(losses.get((name, value), "") for value in times)] for name in names]
    caption = (
        "Loss of trained models when they are evaluated with other memory lengths than they were trained with (rings). "
        "One panel per segment length, one line per memory length in training"
    )
    columns = (
        "The same as numbers; columns say how many times the memory of training was used in evaluation. For runs "
        "trained without memory (m0) it is how many times their segment length"
    )
    draw = lambda palette: context_charts.loss_by_evaluated_memory(shown, palette)  # noqa: E731
    return section(
        "Other memory than in training",
        _drawn(directory / "evaluated.png", draw, caption),
        paragraph(columns + "."),
        table(["run", *(f"{value:g}x" for value in times)], cells, "named"),
    )


def _drawn(png: Path, draw: Callable[[Palette], Figure], caption: str) -> str:
    save_png(png, draw(PRINT))
    return chart_html(draw(PAGE), caption) + paragraph(caption + ".")


def _cards(rows: Sequence[ContextRow]) -> list[Card]:
    cards = []
    for name, (title, _) in SERIES.items():
        mine = _trained(rows, name)
        if mine:
            best = min(mine, key=lambda row: float(row.loss))
            words = f"is the least loss at {title[0].lower()}{title[1:]}: segments of {best.segment_length}, memory of "
            cards.append(Card(f"{best.loss:.4f}", f"{words}{best.memory_length}"))
    return cards


def _trained(rows: Sequence[ContextRow], name: str) -> list[ContextRow]:
    """The rows of a series whose memory in evaluation is that of training."""
    return [row for row in rows if getattr(row, name) and row.evaluated_memory == row.memory_length]
