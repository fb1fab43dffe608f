"""The pictures of a context report. Memory lengths stand at equal distances, so that none has its place too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pretrain.reporting.charts import (
    Palette,
    canvas,
    legend,
    legend_above,
    panels,
    plain_ticks,
    spread_colors,
)
from pretrain.scaling.charts import LOSS
from pretrain.scaling.context_table import ContextRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELS = 5  # of an axis of a panel


def loss_by_memory(rows: Sequence[ContextRow], palette: Palette) -> Figure:
    """Loss over the memory length of training (and evaluation), a line per segment length."""
    figure, axes = canvas(
        palette, 3.4, "memory length M, in training as in evaluation (tokens)", LOSS
    )
    memories = sorted({row.memory_length for row in rows})
    segments = sorted({row.segment_length for row in rows})
    for segment, color in zip(segments, spread_colors(len(segments)), strict=True):
        mine = sorted(
            (row for row in rows if row.segment_length == segment),
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
            label=segment,
        )
    axes.set_xticks(range(len(memories)), [str(memory) for memory in memories])
    plain_ticks(axes.yaxis)
    legend(axes, palette, title="segment length T (tokens)")
    return figure


def loss_by_evaluated_memory(rows: Sequence[ContextRow], palette: Palette) -> Figure:
    """Loss over the memory length of evaluation, a panel per segment length, a line per memory length of training."""
    segments, memories, evaluated = (
        sorted({int(getattr(row, name)) for row in rows})
        for name in ("segment_length", "memory_length", "evaluated_memory")
    )
    x_label = "memory length in evaluation (tokens)"
    figure, all_axes = panels(palette, 3.2, len(segments), x_label, LOSS)
    for axes, segment in zip(all_axes, segments, strict=True):
        axes.set_title(f"segments of {segment}", color=palette.ink, fontsize=8.5)
        for memory, color in zip(memories, spread_colors(len(memories)), strict=True):
            _line(axes, [row for row in rows if (row.segment_length, row.memory_length) == (segment, memory)],
                  evaluated, color, palette)  # fmt: skip
        every = -(-len(evaluated) // MOST_LABELS)
        axes.set_xticks(
            range(0, len(evaluated), every), [str(length) for length in evaluated[::every]]
        )
        plain_ticks(axes.yaxis)
    title = "memory length M in training (tokens); in a ring: evaluated as trained"
    legend_above(figure, all_axes[0], palette, title)
    return figure


def _line(
    axes: Axes, rows: Sequence[ContextRow], evaluated: Sequence[int], color: str, palette: Palette
) -> None:
    rows = sorted(rows, key=lambda row: int(row.evaluated_memory))
    if not rows:
        return
    places = [evaluated.index(int(row.evaluated_memory)) for row in rows]
    axes.plot(
        places, [row.loss for row in rows], "o-", color=color, markersize=3.5, linewidth=1.3,
        label=str(rows[0].memory_length),
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
