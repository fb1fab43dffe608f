"""The pictures of the demo's report."""

from __future__ import annotations

from typing import Any

from pretrain.reporting.charts import PAGE, canvas, chart_html, legend

LABEL: dict[str, Any] = {"color": PAGE.ink, "fontsize": 9}


def loss_curves(
    undisturbed: dict[int, float],
    killed: dict[int, float],
    validation: list[tuple[int, float]],
    checkpoint: int,
    killed_after: int,
) -> str:
    """Both runs' training losses over the steps, with the kill and the checkpoint marked."""
    figure, axes = canvas(PAGE, 3.0, "step", "loss, nats per token")
    axes.plot(
        list(undisturbed),
        list(undisturbed.values()),
        color=PAGE.first,
        linewidth=5.0,
        label="undisturbed",
    )
    axes.plot(
        list(killed),
        list(killed.values()),
        color=PAGE.second,
        linewidth=1.1,
        label="killed and resumed",
    )
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, "o", color=PAGE.ink, markersize=4, label="validation")
    axes.axvspan(checkpoint, killed_after, color=PAGE.alarm, alpha=0.12, linewidth=0)
    axes.axvline(killed_after, color=PAGE.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.axvline(checkpoint, color=PAGE.second, linewidth=1.0, linestyle=(0, (1, 2)))
    # The loss falls, so the upper right is free; the labels sit on either side of the band.
    marks = {
        "rotation": 0,
        "fontsize": 8.5,
        "xycoords": ("data", "axes fraction"),
        "textcoords": "offset points",
    }
    axes.annotate("SIGKILL", (killed_after, 0.62), (6, 0), color=PAGE.alarm, ha="left", **marks)
    axes.annotate(
        "resumed from here", (checkpoint, 0.62), (-6, 0), color=PAGE.second, ha="right", **marks
    )
    axes.set_xlim(0, max(undisturbed) * 1.01)
    legend(axes, PAGE, loc="upper right")
    return chart_html(
        figure,
        "Training loss over steps of the undisturbed and of the killed and resumed run: one curve",
    )


def loss_by_memory(rows: list[dict[str, Any]]) -> str:
    """Validation loss at each memory length; the first is without memory."""
    figure, axes = canvas(PAGE, 2.4, "tokens of memory", "validation loss")
    losses = [row["loss"] for row in rows]
    names = [
        f"{row['memory_length']}" + (f"\n{row['times']}x" if row["times"] else "\nnone")
        for row in rows
    ]
    axes.plot(names, losses, color=PAGE.first, linewidth=2.5, zorder=1)
    axes.scatter(
        names, losses, s=52, color=[PAGE.faint] + [PAGE.second] * (len(rows) - 1), zorder=2
    )
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
    figure, axes = canvas(PAGE, 2.4, "position in the segment", "validation loss")
    by_times = {row["times"]: row["loss_by_position"] for row in rows}
    positions = range(1, len(by_times[0]) + 1)
    axes.plot(positions, by_times[0], color=PAGE.faint, linewidth=1.4, label="without memory")
    axes.plot(positions, by_times[1], color=PAGE.second, linewidth=1.8, label="with memory")
    axes.set_xlim(1, len(by_times[0]))
    legend(axes, PAGE, loc="upper right")
    return chart_html(figure, "Validation loss by position in the segment, with and without memory")
