"""What each name of a loss means. Whatever shows a loss takes it, and its name, from here.

step loss        of one step: the mean over its tokens on all ranks; `loss` in metrics.jsonl
train loss       the mean step loss of an interval of metrics, without skipped steps; `train_loss`
                 in the interval's last line. A run's is that of its latest interval with such steps
smoothed loss    a curve: the mean step loss of the steps around each step, a 60th of the run's
                 steps to each side
validation loss  of the latest evaluation, with the memory that the run trains with; `loss` in its
                 line. `bits_per_byte` is the same loss, per byte of the text
loss of a set    the same of another corpus (`evaluation.sets`, or a part of a mixture), in the same
                 line: `loss/NAME`, and `bits_per_byte/NAME`
memory gain      how much lower the validation loss is than without memory, of the same evaluation

All but bits per byte are in nats per token. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

STEP_LOSS, TRAIN_LOSS, SMOOTHED_LOSS = "step loss", "train loss", "smoothed loss"
VALIDATION_LOSS, MEMORY_GAIN = "validation loss", "memory gain"
_SET_LOSS, _SET_BITS = "loss/", "bits_per_byte/"
_SMOOTHED_PARTS = 60


def train_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the train loss of an interval from the lines of its steps; None if it has none."""
    losses = [line["loss"] for line in lines if not line["skipped"] and line["loss"] is not None]
    return sum(losses) / len(losses) if losses else None


def smoothed_loss(losses_X: np.ndarray, num_steps_X: np.ndarray) -> np.ndarray:
    """Return the smoothed loss at each X: a step, or so many with the sum of their losses."""
    import numpy as np  # late: `launcher` starts without it

    count = len(losses_X)
    width = max(1, count // _SMOOTHED_PARTS)
    sums_X, counts_X = (
        np.concatenate([[0.0], np.cumsum(each_X)]) for each_X in (losses_X, num_steps_X)
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
