"""Warnings of a learning rate that looks too high or too low, for a run's report.

too high  the smoothed loss rose to 1.5 times the loss of untrained weights (ln V, or the first loss
          if that is higher); or the last fifth of the step losses is a tenth above the lowest
          fifth, unless the latest validation loss is within 1% of the lowest
too low   the median update of the layers is below a 10,000th of their weights (usual: a 1000th)

Only the first condition counts steps of the warm-up. In runs of 200 steps at rates from 1e-6 to 1,
"too low" was said at 1e-5 and less, where nothing was learned, and "too high" at 0.1 and more,
where validation losses were worst. Updates do not show a rate that is too high: it makes the
weights larger by as much.
"""

import math
from collections.abc import Iterator

import numpy as np

from pretrain.reporting.run_history import History
from pretrain.rundir.metric_names import SMOOTHED_LOSS, STEP_LOSS

LEAST_STEPS = 50  # after the warm-up; with fewer, updates and rises are not judged
SMALL_UPDATE = 1e-4  # relative to the weights
ABOVE_UNTRAINED = 1.5  # times the loss of untrained weights
PARTS, LARGE_RISE = 5, 0.1  # parts of the losses; how far the last is above the lowest, relative
# If the validation loss is less than this above its lowest, only the training data got harder.
LEAST_RISE = 0.01


def rate_warnings(history: History) -> list[str]:
    """Return a sentence per warning."""
    return [*_too_high(history), *_too_low(history)]


def _too_high(history: History) -> Iterator[str]:
    rate = f"optim.learning_rate={history.config.optim.learning_rate:g} looks too high"
    steps_X, smooth_X = history.smooth_loss
    highest, untrained = int(np.argmax(smooth_X)), _untrained_loss(history)
    if smooth_X[highest] > ABOVE_UNTRAINED * untrained:
        yield (
            f"{rate}, or its warm-up too short: the {SMOOTHED_LOSS} rose to "
            f"{smooth_X[highest]:.3g} at step {int(steps_X[highest]):,}, above the {untrained:.3g} "
            "of untrained weights."
        )
    elif rise := _rise(history):
        yield (
            f"{rate}: the last fifth of the {STEP_LOSS}es is {rise:.0%} above the lowest fifth. "
            "Lower the rate, or let it decay further."
        )


def _untrained_loss(history: History) -> float:
    """Return about the loss of untrained weights; inf if the run started from trained ones."""
    if history.config.initial_weights is not None:
        return math.inf
    first = float(history.smooth_loss[1][0])
    return max(first, math.log(history.config.model.vocab_size or 1))


def _too_low(history: History) -> Iterator[str]:
    optim, update = history.config.optim, _median_update(history)
    if update is None or update >= SMALL_UPDATE or history.config.initial_weights is not None:
        return  # weights that were trained before may need small updates
    yield (
        f"optim.learning_rate={optim.learning_rate:g} looks too low: the median update of a layer "
        f"is {update:.2g} of its weights, 1e-3 to 1e-2 are usual. Raise the rate; "
        "'pretrain scale plan --rates' finds a good one."
    )


def _median_update(history: History) -> float | None:
    """Return the layers' median update by their weights, of steps at half the peak rate or more."""
    peak = history.config.optim.learning_rate
    rates = {line["step"]: line["learning_rate"] for line in history.train}
    updates = [
        value
        for layer in history.layers("update_ratio")
        if layer.startswith("layer.")
        for step, value in zip(*_after_warmup(history, f"update_ratio/{layer}"), strict=True)
        if rates[int(step)] >= peak / 2
    ]
    enough = history.step - history.config.optim.schedule.warmup_steps >= LEAST_STEPS
    return float(np.median(updates)) if updates and enough else None


def _rise(history: History) -> float:
    """Return how far the latest phase's last losses are above its lowest; 0 unless it is clear."""
    measured, optim = history.measured, history.config.optim
    starts = [phase.from_step for phase in history.config.data.phases]
    first = max([optim.schedule.warmup_steps, *(start for start in starts if start < history.step)])
    after_B = measured.loss_steps_B > first
    if measured.num_losses_B[after_B].sum() < LEAST_STEPS:
        return 0.0
    sums_P, counts_P = (
        np.array([part.sum() for part in np.array_split(values_B[after_B], PARTS)])
        for values_B in (measured.loss_sums_B, measured.num_losses_B)
    )
    levels_P = sums_P / counts_P
    rise = float(levels_P[-1] / levels_P.min() - 1)
    for lines in history.evaluations_by_text.values():
        _, validated_X = history.series("loss", lines)
        if len(validated_X) > 1 and validated_X[-1] < (1 + LEAST_RISE) * validated_X.min():
            return 0.0
    return rise if rise > LARGE_RISE else 0.0


def _after_warmup(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values after the warm-up at the ends of intervals, not of skipped steps."""
    warmup = history.config.optim.schedule.warmup_steps
    lines = [
        line
        for line in history.train
        if line["step"] > warmup and not line["skipped"] and "tokens_per_second" in line
    ]
    return history.series(name, lines)
