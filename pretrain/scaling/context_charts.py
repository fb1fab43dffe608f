"""The pictures of a context report. Memory lengths stand at equal distances, so that none has its place too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pretrain.scaling.charts import BUDGET_COLOURS, Palette, canvas, legend, plain_ticks
from pretrain.scaling.context_table import ContextRow

DASHES = ((0, (1, 1.5)), (0, (5, 2)), "-", (0, (7, 2, 1, 2)))

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def loss_by_memory(rows: Sequence[ContextRow], palette: Palette) -> Figure:
    """Loss over the memory length of training (and evaluation), a line per segment length."""
    figure, axes = canvas(palette, 3.4, "memory length M in training and evaluation (tokens)", "loss (nats per token)")
    memories = sorted({row.memory_length for row in rows})
    segments = sorted({row.segment_length for row in rows})
    for segment, colour in zip(segments, _colours(len(segments)), strict=True):
        mine = sorted((row for row in rows if row.segment_length == segment), key=lambda row: row.memory_length)
        places = [memories.index(row.memory_length) for row in mine]
        axes.plot(places, [row.loss for row in mine], "o-", color=colour, markersize=4, linewidth=1.4, label=segment)
    _named_places(axes, [str(memory) for memory in memories])
    legend(axes, palette, title="segment length T")
    return figure


def loss_by_evaluated_memory(rows: Sequence[ContextRow], palette: Palette) -> Figure:
    """Loss over the memory length of evaluation, as a multiple of the one in training; a line per run.

    Segment lengths differ in colour, memory lengths of training in the line's dashes.
    """
    figure, axes = canvas(palette, 3.8, "memory in evaluation over memory in training", "loss (nats per token)")
    times = sorted({float(row.times) for row in rows})
    segments, memories = (sorted({getattr(row, name) for row in rows}) for name in ("segment_length", "memory_length"))
    colours = _colours(len(segments))
    for name in dict.fromkeys(row.name for row in rows):
        mine = sorted((row for row in rows if row.name == name), key=lambda row: float(row.times))
        colour = colours[segments.index(mine[0].segment_length)]
        dashes = DASHES[memories.index(mine[0].memory_length) % len(DASHES)]
        places = [times.index(float(row.times)) for row in mine]
        label = f"T {mine[0].segment_length}, M {mine[0].memory_length}"
        axes.plot(
            places, [row.loss for row in mine], "o", ls=dashes, color=colour, markersize=3.5, linewidth=1.3, label=label
        )
    _named_places(axes, [f"{value:g}x" for value in times])
    legend(axes, palette)
    return figure


def _named_places(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names)
    plain_ticks(axes.yaxis)


def _colours(count: int) -> list[str]:
    return [BUDGET_COLOURS[round(i * (len(BUDGET_COLOURS) - 1) / max(1, count - 1))] for i in range(count)]
