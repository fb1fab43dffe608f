"""The losses of a context sweep as one HTML page, with its charts as PNG files beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.errors import DataError
from pretrain.reporting.charts import (
    PAGE,
    PRINT,
    Palette,
    canvas,
    chart_html,
    legend,
    legend_above,
    panels,
    plain_ticks,
    save_png,
    spread_colors,
)
from pretrain.reporting.html import Card, page, paragraph, section, table
from pretrain.reporting.page_files import write_page
from pretrain.scaling.charts import LOSS
from pretrain.scaling.context import ContextRow
from pretrain.scaling.intervals import amount
from pretrain.terminal.text import flops_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELS = 5  # of an axis of a panel
OTHER_MEMORY = "Other memory than in training"


def models_of(rows: Sequence[ContextRow]) -> dict[str, str]:
    """Return each series with what tells it from the others; empty if there is only one."""
    seeded = len({row.seed for row in rows}) > 1
    names = {
        row.series: (row.differs or f"N={amount(float(row.N))}") + f" seed={row.seed}" * seeded
        for row in rows
    }
    if len(names) < 2:
        return dict.fromkeys(names, "")
    first = {row.series: row.name for row in reversed(rows)}
    told = list(names.values())
    return {
        series: name if told.count(name) == 1 else f"{name} (as {first[series]})"
        for series, name in names.items()
    }


def refuse_repeats(rows: Sequence[ContextRow]) -> None:
    """Raise DataError for two runs that would share a point of a line."""
    seen: dict[tuple[object, ...], str] = {}
    for row in rows:
        series = (row.same_tokens, row.same_flops, row.series)
        key = (*series, row.segment_length, row.memory_length, row.evaluated_memory)
        if (other := seen.setdefault(key, row.name)) != row.name:
            raise DataError(
                f"{other} and {row.name} have the same settings, segment and memory; leave one of "
                "them out of the table"
            )


def loss_by_memory(rows: Sequence[ContextRow], palette: Palette) -> Figure:
    """Loss over the memory length of training (and evaluation), a line per model and segment."""
    figure, axes = canvas(
        palette, 3.4, "memory length M, in training as in evaluation (tokens)", LOSS
    )
    memories = sorted({row.memory_length for row in rows})
    models = models_of(rows)
    lines = sorted({(row.segment_length, models[row.series], row.series) for row in rows})
    for (segment, model, series), color in zip(lines, spread_colors(len(lines)), strict=True):
        mine = sorted(
            (row for row in rows if (row.segment_length, row.series) == (segment, series)),
            key=lambda row: row.memory_length,
        )
        places = [memories.index(row.memory_length) for row in mine]
        axes.plot(
            places,
            [row.loss for row in mine],
            "o-",
            color=color,
            markersize=4,
            linewidth=1.4,
            label=f"{segment}{', ' * bool(model)}{model}",
        )
    axes.set_xticks(range(len(memories)), [str(memory) for memory in memories])
    plain_ticks(axes.yaxis)
    legend(axes, palette, title="segment length T (tokens)")
    return figure


def loss_by_evaluated_memory(rows: Sequence[ContextRow], palette: Palette) -> Figure:
    """Loss over the evaluation's memory, a panel per segment, a line per model and training's."""
    segments, evaluated = (
        sorted({int(getattr(row, name)) for row in rows})
        for name in ("segment_length", "evaluated_memory")
    )
    models = models_of(rows)
    lines = sorted({(row.memory_length, models[row.series], row.series) for row in rows})
    x_label = "memory length in evaluation (tokens)"
    figure, all_axes = panels(palette, 3.2, len(segments), x_label, LOSS)
    for axes, segment in zip(all_axes, segments, strict=True):
        axes.set_title(f"segments of {segment}", color=palette.ink, fontsize=8.5)
        for (memory, model, series), color in zip(lines, spread_colors(len(lines)), strict=True):
            trained = [row for row in rows if row.segment_length == segment]
            mine = [row for row in trained if (row.memory_length, row.series) == (memory, series)]
            _line(axes, mine, evaluated, color, palette, f"{memory}{', ' * bool(model)}{model}")
        every = -(-len(evaluated) // MOST_LABELS)
        axes.set_xticks(
            range(0, len(evaluated), every), [str(length) for length in evaluated[::every]]
        )
        plain_ticks(axes.yaxis)
    title = "memory length M in training (tokens); in a ring: evaluated as trained"
    legend_above(figure, all_axes[0], palette, title)
    return figure


def _line(
    axes: Axes,
    rows: Sequence[ContextRow],
    evaluated: Sequence[int],
    color: str,
    palette: Palette,
    label: str,
) -> None:
    rows = sorted(rows, key=lambda row: int(row.evaluated_memory))
    if not rows:
        return
    places = [evaluated.index(int(row.evaluated_memory)) for row in rows]
    axes.plot(
        places, [row.loss for row in rows], "o-", color=color, markersize=3.5, linewidth=1.3,
        label=label,
    )  # fmt: skip
    as_trained = [
        (place, row.loss)
        for place, row in zip(places, rows, strict=True)
        if row.evaluated_memory == row.memory_length
    ]
    for place, loss in as_trained:
        axes.plot(
            [place], [loss], "o", markersize=8, markerfacecolor="none", markeredgecolor=palette.ink
        )


SERIES = {  # attribute of a row -> title, what is equal in words
    "same_tokens": (
        "Equal tokens",
        "tokens; a longer context costs more FLOPs",
    ),
    "same_flops": (
        "Equal FLOPs",
        "FLOPs; a longer context reads fewer tokens",
    ),
}


def write_context_report(
    rows: Sequence[ContextRow], source: Path, directory: Path, title: str
) -> Path:
    """Write report.html about the table `source`, and the PNGs; return the path of report.html."""
    refuse_repeats(rows)
    directory.mkdir(parents=True, exist_ok=True)
    sections = [_series(rows, name, directory) for name in SERIES if _trained(rows, name)]
    sections.append(_evaluated(rows, directory))
    sizes = sorted({int(row.N) for row in rows})
    lead = (
        f"{len({row.name for row in rows})} runs of {' and '.join(amount(size) for size in sizes)} "
        f"parameters that differ in segment and memory length{_besides(rows)}, evaluated with "
        "memories of 0 to 8 times their own."
    )
    path = directory / "report.html"
    footer = (
        "Written by 'pretrain scale context report'. "
        "Losses in nats per token of the validation split."
    )
    text = page(title, "Context lengths", lead, _cards(rows), sections, footer)
    write_page(path, text, [source])
    return path


_HEADS = ("run", "segment", "memory", "N", "tokens", "FLOPs", "loss", "model")


def _besides(rows: Sequence[ContextRow]) -> str:
    """What else the runs differ in, as a part of a sentence."""
    models = [name for name in models_of(rows).values() if name]
    return f", and in their model: {'; '.join(models)}" if models else " only"


def _series(rows: Sequence[ContextRow], name: str, directory: Path) -> str:
    title, words = SERIES[name]
    mine = _trained(rows, name)
    models = models_of(mine)
    same = "Each line: the same model and" if len(models) > 1 else "All runs: the same model and"
    caption = f"Loss over memory length, one line per segment length. {same} {words}"
    heads, *cells = trained_table(rows, name)
    return section(
        title,
        _drawn(
            directory / f"{name}.png",
            lambda palette: loss_by_memory(mine, palette),
            caption,
        ),
        table(heads, cells, "named"),
    )


def context_tables(rows: Sequence[ContextRow]) -> dict[str, list[list[str]]]:
    """The page's tables by their titles, heads first."""
    found = {title: trained_table(rows, name) for name, (title, _) in SERIES.items()}
    return {title: each for title, each in found.items() if each[1:]} | {
        OTHER_MEMORY: evaluated_table(rows)
    }


def trained_table(rows: Sequence[ContextRow], name: str) -> list[list[str]]:
    """The runs of a series by their losses, heads first."""
    mine = _trained(rows, name)
    models = models_of(mine)
    heads = _HEADS if len(models) > 1 else _HEADS[:-1]
    cells = [
        [row.name, str(row.segment_length), str(row.memory_length), amount(float(row.N)),
         amount(float(row.D)), flops_text(float(row.C)), f"{row.loss:.4f}", models[row.series]]
        for row in sorted(mine, key=lambda row: float(row.loss))
    ]  # fmt: skip
    return [list(heads), *(row[: len(heads)] for row in cells)]


def evaluated_table(rows: Sequence[ContextRow]) -> list[list[str]]:
    """The losses of each run with other memories than in training's, heads first."""
    shown = _shown(rows)
    times = sorted({float(row.times) for row in shown})
    names = list(dict.fromkeys(row.name for row in shown))
    losses = {(row.name, float(row.times)): f"{row.loss:.4f}" for row in shown}
    cells = [[name, *(losses.get((name, value), "") for value in times)] for name in names]
    return [["run", *(f"{value:g}x" for value in times)], *cells]


def _shown(rows: Sequence[ContextRow]) -> list[ContextRow]:
    return [row for row in rows if row.same_tokens] or list(rows)


def _evaluated(rows: Sequence[ContextRow], directory: Path) -> str:
    shown = _shown(rows)
    heads, *cells = evaluated_table(rows)
    caption = (
        "Loss of trained models when they are evaluated with other memory lengths than they were "
        "trained with (rings). "
        "One panel per segment length, one line per memory length in training"
    )
    columns = (
        "The same as numbers; columns say how many times the memory of training was used in "
        "evaluation. For runs "
        "trained without memory (m0) it is how many times their segment length"
    )
    draw = lambda palette: loss_by_evaluated_memory(shown, palette)  # noqa: E731
    return section(
        OTHER_MEMORY,
        _drawn(directory / "evaluated.png", draw, caption),
        paragraph(columns + "."),
        table(heads, cells, "named"),
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
            lengths = f"segments of {best.segment_length}, memory of {best.memory_length}"
            words = f"lowest loss at {title[0].lower()}{title[1:]}: {lengths}"
            cards.append(Card(f"{best.loss:.4f}", words))
    return cards


def _trained(rows: Sequence[ContextRow], name: str) -> list[ContextRow]:
    """The rows of a series whose memory in evaluation is that of training."""
    return [row for row in rows if getattr(row, name) and row.evaluated_memory == row.memory_length]
