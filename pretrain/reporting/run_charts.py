"""The charts of run reports and comparisons. Torch-free. X marks the steps of a series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from foundation.errors import printable
from pretrain.reporting.charts import (
    ALARM,
    FAINT,
    FIRST,
    INK,
    SECOND,
    SERIES,
    Panel,
    log_ticks,
    spread_colors,
)
from pretrain.reporting.run_history import History
from pretrain.rundir.metric_names import SMOOTHED_LOSS, STEP_LOSS, VALIDATION_LOSS, set_losses
from pretrain.rundir.metrics_file import totals_of
from pretrain.terminal.text import distinguished

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHED = (0, (4, 3))
SHOWN_PERCENT = 98  # of the losses; higher ones are hidden where the run starts, and nowhere else
SMALLEST_NORM = 1e-12  # a logarithmic axis cannot show 0
# What a run had spent when a line of measurements was written; None where that is not known.
Spent = Callable[[Mapping[str, Any]], float | None]


def run_panels(history: History) -> list[Panel]:
    """The charts that this run has measurements for."""

    def has(name: str, lines: Sequence[Mapping[str, Any]]) -> bool:
        return any(line.get(name) is not None for line in lines)

    train, norm = history.train, "norm before clipping"
    has_sets = bool(set_losses(history.summary.evaluation))
    has_memory = has("loss_without_memory", history.evaluations)
    has_layers = bool(history.layers("grad_norm"))
    norms, updates = (partial(_by_layer, kind) for kind in ("grad_norm", "update_ratio"))
    seconds = "seconds since the first start"
    charts: list[tuple[bool, str, str, str, Callable[[History, Axes], None]]] = [
        (True, "Loss", "step", "loss, nats per token", _loss),
        (has_sets, "Validation by corpus", "step", VALIDATION_LOSS, _losses_of_sets),
        (has_memory, "Value of the memory", "step", VALIDATION_LOSS, _value_of_memory),
        (has("tokens_per_second", train), "Speed", "step", "tokens per second", _speed),
        (has("grad_norm", train), "Gradients", "step", norm, _gradient_norm),
        (has_layers, "Gradients by layer", "step", norm, norms),
        (has_layers, "Updates by layer", "step", "update / weights", updates),
        (has("time", train), "Progress", seconds, "step", _progress),
    ]
    return [
        Panel(title, x_label, y_label, partial(draw, history))
        for is_measured, title, x_label, y_label, draw in charts
        if is_measured
    ]


def comparison_panels(histories: Sequence[History]) -> list[Panel]:
    """Losses over tokens and over time, and speeds over steps, a color per run."""
    loss, seconds = "loss, nats per token", "seconds of training"
    return [
        Panel("Loss", "tokens", loss, partial(_losses, histories, _tokens)),
        Panel("Loss over time", seconds, loss, partial(_losses, histories, _seconds)),
        Panel("Speed", "step", "tokens per second", partial(_speeds, histories)),
    ]


def _loss(history: History, axes: Axes) -> None:
    """Step losses, smoothed, and validation losses; where steps were rewound or skipped."""
    steps_X, losses_X = history.series("loss")
    axes.plot(steps_X, losses_X, color=FIRST, linewidth=0.8, label=STEP_LOSS)
    smooth = {"color": SECOND, "linewidth": 1.6, "label": SMOOTHED_LOSS}
    axes.plot(*history.smooth_loss, **smooth)
    validated = history.series("loss", history.evaluations)
    if history.evaluations:
        axes.plot(*validated, "o", color=INK, markersize=4, label=VALIDATION_LOSS)
    for number, event in enumerate(history.rewinds):
        label = "rewind" if number == 0 else None
        step = event.to_step
        axes.axvline(step, color=ALARM, linewidth=1.2, linestyle=DASHED, label=label)
    skipped = [line["step"] for line in history.train if line["skipped"]]
    if skipped:
        height, across = [0.97] * len(skipped), axes.get_xaxis_transform()  # below the upper edge
        axes.plot(
            skipped, height, "x", color=ALARM, markersize=6, label="skipped",
            transform=across,
        )  # fmt: skip
    _hide_the_first_losses(axes, [losses_X], validated[1])


def _hide_the_first_losses(
    axes: Axes, trained: Sequence[np.ndarray], validated_X: np.ndarray
) -> None:
    """Let the axis end above every loss except those of the first steps.

    A run starts near ln V, and its fall from there would press everything else together. A spike
    later on is what a reader looks for, so its peak is always shown.
    """
    highest, lowest = -np.inf, np.inf
    for losses_X in trained:
        finite_X = losses_X[np.isfinite(losses_X)]
        if len(finite_X):
            after_fall = int(np.argmax(finite_X <= np.percentile(finite_X, SHOWN_PERCENT)))
            highest = max(highest, finite_X[after_fall:].max())
            lowest = min([lowest, finite_X.min(), *validated_X])
    if highest >= lowest:
        margin = highest - lowest
        axes.set_ylim(lowest - 0.05 * margin - 1e-3, highest + 0.1 * margin + 1e-3)


def _speed(history: History, axes: Axes) -> None:
    """Tokens per second of each interval."""
    steps_X, speeds_X = history.series("tokens_per_second")
    axes.plot(steps_X, speeds_X, color=SECOND, linewidth=1.4)
    axes.set_ylim(0, speeds_X.max() * 1.15 if len(speeds_X) else 1)


def _gradient_norm(history: History, axes: Axes) -> None:
    """The norm before clipping, on a logarithmic axis, and where it was clipped."""
    steps_X, norms_X = history.series("grad_norm")
    axes.plot(steps_X, np.maximum(norms_X, SMALLEST_NORM), color=SECOND, linewidth=0.8)
    if clip := history.config.optim.clip_norm:
        axes.axhline(clip, color=FAINT, linewidth=1.0, linestyle=DASHED, label="clipped above")
    axes.set_yscale("log")
    log_ticks(axes.yaxis)


def _by_layer(kind: str, history: History, axes: Axes) -> None:
    """A line per layer in the order of the spectrum; parameters outside of layers stand out."""
    colors = {"embedding": INK, "output": ALARM, "shared": FAINT}
    names = history.layers(kind)
    layers = [name for name in names if name not in colors]
    colors |= dict(zip(layers, spread_colors(len(layers)), strict=True))
    for name in names:
        steps_X, values_X = history.series(f"{kind}/{name}")
        positive_X, label = np.maximum(values_X, SMALLEST_NORM), name.replace(".", " ")
        alone = "o" if len(steps_X) == 1 else ""  # a line of one point shows nothing
        axes.plot(steps_X, positive_X, alone + "-", color=colors[name], linewidth=1.2, label=label)
    axes.set_yscale("log")
    log_ticks(axes.yaxis)


def _value_of_memory(history: History, axes: Axes) -> None:
    """Validation loss with the training's memory and with none."""
    without, with_memory = (
        history.series(name, history.evaluations) for name in ("loss_without_memory", "loss")
    )
    style = {"marker": "o", "markersize": 3.5}
    axes.plot(*without, color=FAINT, linewidth=1.2, label="without memory", **style)
    axes.plot(*with_memory, color=SECOND, linewidth=1.6, label="with memory", **style)


def _losses_of_sets(history: History, axes: Axes) -> None:
    """The validation loss, and that of each set, a color per set."""
    style = {"marker": "o", "markersize": 3.5, "linewidth": 1.4}
    whole = history.series("loss", history.evaluations)
    axes.plot(*whole, color=INK, label=VALIDATION_LOSS, **style)
    measured = {name: None for line in history.evaluations for name in set_losses(line)}
    for number, name in enumerate(measured):
        points = [
            (line["step"], losses[name])
            for line in history.evaluations
            if name in (losses := set_losses(line))
        ]
        steps_X, losses_X = np.array(points, float).reshape(-1, 2).T
        color = SERIES[number % len(SERIES)]
        axes.plot(steps_X, losses_X, color=color, label=printable(name), **style)


def _progress(history: History, axes: Axes) -> None:
    """The step over the time since the first start, with every failed attempt and every rewind."""
    seconds_X, steps_X = history.progress
    units = (("hours", 3600, 7200), ("minutes", 60, 180), ("seconds", 1, -np.inf))
    unit, divisor = next((unit, size) for unit, size, least in units if seconds_X[-1] > least)
    axes.plot(seconds_X / divisor, steps_X, color=SECOND, linewidth=1.6)
    failed_X, reached_X = history.setbacks
    if len(failed_X):
        label = "failed attempt or rewind"
        axes.plot(failed_X / divisor, reached_X, "x", color=ALARM, markersize=7, label=label)
    axes.set_xlabel(f"{unit} since the first start")


def _losses(histories: Sequence[History], spent: Spent, axes: Axes) -> None:
    """Smoothed losses over what was spent, and validation losses as dots, a color per run."""
    for history, color, name in _series(histories):
        points = [(line["step"], spent(line)) for line in history.train]
        known = [(0, 0), *((step, amount) for step, amount in points if amount is not None)]
        spent_at = partial(np.interp, xp=[step for step, _ in known], fp=[x for _, x in known])
        steps_X, losses_X = history.smooth_loss
        axes.plot(spent_at(steps_X), losses_X, color=color, linewidth=1.6, label=name)
        if history.evaluations:
            steps_X, losses_X = history.series("loss", history.evaluations)
            axes.plot(spent_at(steps_X), losses_X, "o", color=color, markersize=3.5)
    validated = [history.series("loss", history.evaluations)[1] for history in histories]
    trained = [history.smooth_loss[1] for history in histories]
    _hide_the_first_losses(axes, trained, np.concatenate(validated))


def _series(histories: Sequence[History]) -> Iterator[tuple[History, str, str]]:
    """Each run with its color and its name, as the tables beside the charts have it."""
    names = distinguished([printable(history.path.name) for history in histories])
    for number, (history, name) in enumerate(zip(histories, names, strict=True)):
        yield history, SERIES[number % len(SERIES)], name


def _tokens(line: Mapping[str, Any]) -> float | None:
    """How many tokens the run had read when the line was written."""
    return line["tokens"]


def _seconds(line: Mapping[str, Any]) -> float | None:
    """How long the run had trained, without evaluations; known at the ends of intervals."""
    totals = totals_of(line)
    return None if totals is None else totals.steps


def _speeds(histories: Sequence[History], axes: Axes) -> None:
    """Tokens per second over steps, a color per run."""
    for history, color, name in _series(histories):
        axes.plot(*history.series("tokens_per_second"), color=color, linewidth=1.4, label=name)
    axes.set_ylim(bottom=0)
