"""The pictures of a run's report and of a comparison, each drawn into given axes in given colours. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pretrain.reporting import html as report
from pretrain.reporting.run_history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUN_COLOURS = (
    "#4f83d6",
    "#d9772f",
    "#2f9e6e",
    "#a05bb5",
    "#c9a02b",
    "#d1495b",
    "#3aa0b8",
    "#86a03a",
)


@dataclass(frozen=True)
class Colours:
    """The page's follow the reader's light or dark setting, print's do not."""

    ink: str
    faint: str
    first: str
    second: str
    alarm: str


PAGE = Colours(report.INK, report.FAINT, report.FIRST, report.SECOND, report.ALARM)
PRINT = Colours("#22252a", "#6d727b", "#b9c7dd", "#2456a6", "#c2410c")


def loss(axes: Axes, history: History, colours: Colours) -> None:
    """Training loss of every step, smoothed, and validation; where the run went back or skipped."""
    steps_X, losses_X = history.series("loss")
    smooth_X = history.smooth_loss[1]
    axes.plot(steps_X, losses_X, color=colours.first, linewidth=0.8)
    axes.plot(steps_X, smooth_X, color=colours.second, linewidth=1.6, label="training, smoothed")
    if history.evaluations:
        axes.plot(
            *history.series("loss", history.evaluations),
            "o",
            color=colours.ink,
            markersize=4,
            label="validation",
        )
    for number, event in enumerate(history.events("rewind")):
        label = "went back" if number == 0 else None
        axes.axvline(
            event["to_step"], color=colours.alarm, linewidth=1.2, linestyle=(0, (4, 3)), label=label
        )
    skipped = [line["step"] for line in history.train if line["skipped"]]
    if skipped:
        top = np.full(len(skipped), np.percentile(losses_X, 98))
        axes.plot(skipped, top, "x", color=colours.alarm, markersize=6, label="skipped")
    _without_the_beginning(axes, losses_X, history.series("loss", history.evaluations)[1])


def speed(axes: Axes, history: History, colours: Colours) -> None:
    """Tokens per second of each interval."""
    steps_X, speeds_X = history.series("tokens_per_second")
    axes.plot(steps_X, speeds_X, color=colours.second, linewidth=1.4)
    axes.set_ylim(0, speeds_X.max() * 1.15 if len(speeds_X) else 1)


def gradient_norm(axes: Axes, history: History, colours: Colours) -> None:
    """The norm before clipping, on a logarithmic axis, and where it was clipped."""
    steps_X, norms_X = history.series("grad_norm")
    axes.plot(steps_X, np.maximum(norms_X, 1e-12), color=colours.second, linewidth=0.8)
    if clip := history.config.optim.clip_norm:
        axes.axhline(
            clip, color=colours.faint, linewidth=1.0, linestyle=(0, (4, 3)), label="clipped above"
        )
    _logarithmic(axes, colours)


def norms_by_layer(axes: Axes, history: History, colours: Colours) -> None:
    """The gradient's norm of each layer."""
    _by_layer(axes, history, colours, "grad_norm")


def updates_by_layer(axes: Axes, history: History, colours: Colours) -> None:
    """How far each layer's weights move in a step, as a share of their length."""
    _by_layer(axes, history, colours, "update_ratio")


def _by_layer(axes: Axes, history: History, colours: Colours, kind: str) -> None:
    """A line per layer, the deeper the darker; what is no layer stands out."""
    others = {"embedding": colours.ink, "output": colours.alarm, "shared": colours.faint}
    names = history.layers(kind)
    layers = [name for name in names if name not in others]
    for name in names:
        steps_X, values_X = history.series(f"{kind}/{name}")
        colour, alpha, label = others.get(name), 1.0, name
        if name in layers:
            number = layers.index(name)
            colour, alpha = colours.second, 0.25 + 0.75 * (number + 1) / len(layers)
            label = name.replace(".", " ") if number in (0, len(layers) - 1) else None
        axes.plot(
            steps_X,
            np.maximum(values_X, 1e-12),
            color=colour,
            alpha=alpha,
            linewidth=1.2,
            label=label,
        )
    _logarithmic(axes, colours)


def _logarithmic(axes: Axes, colours: Colours) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    labelled = "125" if high < 1e3 * low else "1"
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks(lambda value, _place: f"{value:g}" if f"{value:e}"[0] in labelled else "")
    axes.tick_params(which="minor", colors=colours.faint, labelsize=8.5, length=0)


def value_of_memory(axes: Axes, history: History, colours: Colours) -> None:
    """Validation loss with the training's memory and with none."""
    without, with_memory = (
        history.series(name, history.evaluations) for name in ("loss_without_memory", "loss")
    )
    axes.plot(
        *without, "o-", color=colours.faint, markersize=3.5, linewidth=1.2, label="without memory"
    )
    axes.plot(
        *with_memory, "o-", color=colours.second, markersize=3.5, linewidth=1.6, label="with memory"
    )


def progress(axes: Axes, history: History, colours: Colours) -> None:
    """The step over the time since the run began, with every failed attempt and every way back."""
    seconds_X, steps_X = history.progress
    unit, divisor = (
        ("hours", 3600)
        if seconds_X[-1] > 7200
        else ("minutes", 60)
        if seconds_X[-1] > 180
        else ("seconds", 1)
    )
    axes.plot(seconds_X / divisor, steps_X, color=colours.second, linewidth=1.6)
    failed_X, reached_X = history.setbacks
    if len(failed_X):
        words = "attempt failed, or went back"
        axes.plot(
            failed_X / divisor, reached_X, "x", color=colours.alarm, markersize=7, label=words
        )
    axes.set_xlabel(f"{unit} since the first start")


def _without_the_beginning(axes: Axes, trained_X: np.ndarray, validated_X: np.ndarray) -> None:
    """Leave the highest losses out of sight: those of the first steps would press all others together."""
    high = np.percentile(trained_X, 98)
    low = min([trained_X.min(), *validated_X])
    axes.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)


def overlaid_losses(axes: Axes, histories: Sequence[History], colours: Colours) -> None:
    """Smoothed training losses over tokens, and validation as dots, a colour per run."""
    for number, history in enumerate(histories):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        steps_X, losses_X = history.smooth_loss
        axes.plot(
            _tokens_at(steps_X, history), losses_X, color=colour, linewidth=1.6, label=history.name
        )
        if history.evaluations:
            steps_X, losses_X = history.series("loss", history.evaluations)
            axes.plot(_tokens_at(steps_X, history), losses_X, "o", color=colour, markersize=3.5)
    trained = np.concatenate([history.smooth_loss[1] for history in histories])
    validated = np.concatenate(
        [history.series("loss", history.evaluations)[1] for history in histories]
    )
    _without_the_beginning(axes, trained, validated)


def _tokens_at(steps_X: np.ndarray, history: History) -> np.ndarray:
    """How many tokens the run had read after each of the steps."""
    return np.interp(
        steps_X,
        [0, *(line["step"] for line in history.train)],
        [0, *(line["tokens"] for line in history.train)],
    )


def overlaid_speeds(axes: Axes, histories: Sequence[History], colours: Colours) -> None:
    """Tokens per second over steps, a colour per run."""
    for number, history in enumerate(histories):
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        axes.plot(
            *history.series("tokens_per_second"), color=colour, linewidth=1.4, label=history.name
        )
    axes.set_ylim(bottom=0)
