"""The pictures of the demo's report."""

from __future__ import annotations

from typing import Any

from pretrain.reporting.html import ALARM, FAINT, FIRST, INK, SECOND, chart_html, legend, new_chart

LABEL: dict[str, Any] = {"color": INK, "fontsize": 9}


def loss_curves(
    undisturbed: dict[int, float],
    killed: dict[int, float],
    validation: list[tuple[int, float]],
    checkpoint: int,
    killed_after: int,
) -> str:
    """Both runs' training losses over the steps, with the kill and the checkpoint marked."""
    figure, axes = new_chart(3.0, "step", "loss, nats per token")
    axes.plot(
        list(undisturbed),
        list(undisturbed.values()),
        color=FIRST,
        linewidth=5.0,
        label="undisturbed",
    )
    axes.plot(
        list(killed), list(killed.values()), color=SECOND, linewidth=1.1, label="killed and resumed"
    )
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, "o", color=INK, markersize=4, label="validation")
    axes.axvspan(checkpoint, killed_after, color=ALARM, alpha=0.12, linewidth=0)
    axes.axvline(killed_after, color=ALARM, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.axvline(checkpoint, color=SECOND, linewidth=1.0, linestyle=(0, (1, 2)))
    # The loss falls, so the upper right is free; the labels sit on either side of the band.
    marks = {
        "rotation": 0,
        "fontsize": 8.5,
        "xycoords": ("data", "axes fraction"),
        "textcoords": "offset points",
    }
    axes.annotate("SIGKILL", (killed_after, 0.62), (6, 0), color=ALARM, ha="left", **marks)
    axes.annotate(
        "resumed from here", (checkpoint, 0.62), (-6, 0), color=SECOND, ha="right", **marks
    )
    axes.set_xlim(0, max(undisturbed) * 1.01)
    legend(axes, loc="upper right")
    return chart_html(
        figure,
        "Training loss over steps of the undisturbed and of the killed and resumed run: one curve",
    )


def loss_by_memory(rows: list[dict[str, Any]]) -> str:
    """Validation loss at each memory length; the first is without memory."""
    figure, axes = new_chart(2.4, "tokens of memory", "validation loss")
    losses = [row["loss"] for row in rows]
    names = [
        f"{row['memory_length']}" + (f"\n{row['times']}x" if row["times"] else "\nnone")
        for row in rows
    ]
    axes.plot(names, losses, color=FIRST, linewidth=2.5, zorder=1)
    axes.scatter(names, losses, s=52, color=[FAINT] + [SECOND] * (len(rows) - 1), zorder=2)
    for place, loss in enumerate(losses):
        axes.annotate(
            f"{loss:.3f}", (place, loss), (0, 8), textcoords="offset points", ha="center", **LABEL
        )
    spread = max(losses) - min(losses) + 0.01
    axes.set_ylim(min(losses) - 0.15 * spread, max(losses) + 0.22 * spread)
    axes.margins(x=0.12)
    return chart_html(figure, "Validation loss for each length of memory")


def loss_by_position(rows: list[dict[str, Any]]) -> str:
    """Loss at each position of the segment, without memory and with the training's."""
    figure, axes = new_chart(2.4, "position in the segment", "validation loss")
    by_times = {row["times"]: row["loss_by_position"] for row in rows}
    positions = range(1, len(by_times[0]) + 1)
    axes.plot(positions, by_times[0], color=FAINT, linewidth=1.4, label="without memory")
    axes.plot(positions, by_times[1], color=SECOND, linewidth=1.8, label="with memory")
    axes.set_xlim(1, len(by_times[0]))
    legend(axes, loc="upper right")
    return chart_html(figure, "Validation loss by position in the segment, with and without memory")
