"""What each loss and speed is called, and means, wherever it is shown. Torch-free.

step loss        of one step: the mean over its tokens on all ranks; `loss` in metrics.jsonl
train loss       the mean step loss of an interval of metrics, without skipped steps; `train_loss`
                 in the interval's last line. A run's is the latest that it has
smoothed loss    a curve: the mean step loss of the steps around each step, a 60th of the run's
                 steps to each side
validation loss  of the latest evaluation, with the memory that the run trains with; `loss` in its
                 line. `bits_per_byte` is the same loss, per byte of the text. `tokens` and
                 `documents` count what was read. `standard_error` estimates how far the loss is
                 from the loss on all text of that kind (from `parts`, see `evaluated_text.py`)
loss of a set    the same for another corpus (`evaluation.sets`, or a part of a mixture), in the
                 same line: `loss/NAME`, and `bits_per_byte/NAME`
memory gain      how much lower the validation loss is than without memory, in one evaluation
tokens/s         of an interval of metrics: tokens of its steps over their seconds;
                 `tokens_per_second` in the interval's last line, tok/s in the log
recent tokens/s  the median of the latest five intervals; the time left follows from it
run tokens/s     tokens of all steps that count, over their seconds
scored tokens/s  of an evaluation: tokens of the split that it scored, over its seconds

All losses but bits per byte are in nats per token. Tokens are of all ranks. Seconds include waiting
for data, but not evaluation, waiting for saves, stalls and restarts; goodput counts these. Metrics
of lm-eval's tasks in the line of an evaluation: `tasks/TASK/METRIC`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pretrain.rundir.evaluated_text import PARTS

if TYPE_CHECKING:
    import numpy as np

STEP_LOSS, TRAIN_LOSS, SMOOTHED_LOSS = "step loss", "train loss", "smoothed loss"
VALIDATION_LOSS, MEMORY_GAIN = "validation loss", "memory gain"
SPEED, RECENT_SPEED, RUN_SPEED = "tokens/s", "recent tokens/s", "run tokens/s"
SCORED_SPEED = "scored tokens/s"
_SET_LOSS, _SET_BITS = "loss/", "bits_per_byte/"
_TASKS, _NO_FILTER = "tasks/", "none"
_SMOOTHED_PARTS = 60


def train_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the train loss of an interval from the lines of its steps; None if it has none."""
    losses = [line["loss"] for line in lines if not line["skipped"] and line["loss"] is not None]
    return sum(losses) / len(losses) if losses else None


def smoothed_loss(losses_X: np.ndarray, num_steps_X: np.ndarray) -> np.ndarray:
    """Return the smoothed loss at each X: a step, or several steps whose losses are summed."""
    import numpy as np  # late: `launcher` starts without it

    count = len(losses_X)
    width = max(1, count // _SMOOTHED_PARTS)
    sums_X, counts_X = (
        np.concatenate([[0.0], np.cumsum(values_X)]) for values_X in (losses_X, num_steps_X)
    )
    begins_X = np.maximum(np.arange(count) - width, 0)
    ends_X = np.minimum(np.arange(count) + width + 1, count)
    return (sums_X[ends_X] - sums_X[begins_X]) / (counts_X[ends_X] - counts_X[begins_X])


def memory_gain(evaluation: Mapping[str, Any]) -> float | None:
    """Return the memory gain from the line of an evaluation; None if it has not measured it."""
    loss, without = evaluation.get("loss"), evaluation.get("loss_without_memory")
    return None if loss is None or without is None else without - loss


def set_values(name: str, loss: float, bits_per_byte: float) -> dict[str, float]:
    """Return the fields of a set in the line of an evaluation."""
    return {f"{_SET_LOSS}{name}": loss, f"{_SET_BITS}{name}": bits_per_byte}


def set_losses(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the losses of sets, by name, from the line of an evaluation."""
    losses = {
        name.removeprefix(_SET_LOSS): value
        for name, value in (evaluation or {}).items()
        if name.startswith(_SET_LOSS)
    }
    return {name: loss for name, loss in losses.items() if loss is not None}


def set_loss_name(name: str) -> str:
    """Return what the loss of a set is called in tables."""
    return f"{VALIDATION_LOSS} of {name}"


def task_values(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the fields of tasks from the harness's results; None for NaN and inf."""
    fields: dict[str, float | None] = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            name = metric if chosen == _NO_FILTER else f"{metric}/{chosen}"
            fields[f"{_TASKS}{task}/{name}"] = float(value) if math.isfinite(value) else None
    return fields


def task_columns(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    """Return `tasks/TASK/METRIC` -> value from the line of an evaluation."""
    return {
        name: value
        for name, value in (evaluation or {}).items()
        if name.startswith(_TASKS) and value is not None
    }


def latest_with_tasks(evaluations: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the latest line with metrics of tasks, which not every evaluation has."""
    return next((line for line in reversed(list(evaluations)) if task_columns(line)), None)


def dashboard_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what dashboards draw of a line: `loss` of kind `train` is named `train/loss`."""
    return {
        f"{line['kind']}/{name}": value
        for name, value in line.items()
        if name not in ("kind", "step", "time", "totals", "attempt", PARTS) and value is not None
    }
