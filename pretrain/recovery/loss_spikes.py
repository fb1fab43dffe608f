"""What counts as a loss spike: a pure function of the losses, so all who ask agree. Torch-free."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from pretrain.config.run import RunConfig
from pretrain.rundir.events import Spike

# The smallest deviation to assume, as a fraction of the median: where losses hardly vary, a small
# rise is no spike.
LEAST_DEVIATION = 0.01
# Losses that each new one is compared with. Short, so that the loss falls little within it. A run
# cannot rewind before it has as many of the same data, or in the warm-up of the learning rate.
WINDOW = 50
SPIKE_STEPS = 20  # anomalous steps in a row that make a spike; a shorter jump is none
DEVIATIONS_PER_MAD = 1.4826  # standard deviations per median absolute deviation, normally
# A spike starts above the threshold and lasts while losses are above this part of it: losses vary
# more in a spike than before it, so a single one near the threshold is not its end.
STILL_ABOVE = 0.25
MOST_SKIPPED = 0.5  # of the last WINDOW updates; a run that skips more does not learn


class SpikeDetector:
    """Takes every step in order. Later losses are compared with those that were not anomalous.

    Losses are compared with those of the same data only: the history starts again at each phase. Up
    to the end of the warm-up of the learning rate, and before WINDOW losses are known, no loss is
    anomalous.
    """

    def __init__(self, run: RunConfig) -> None:
        self._threshold = run.recovery.spike_threshold
        self._warmup_steps = max(run.optim.schedule.warmup_steps, WINDOW)
        self._data_changes = [phase.from_step for phase in run.data.phases]
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._suspicion: list[tuple[int, float | None]] = []
        self._skipped: deque[tuple[int, bool]] = deque(maxlen=WINDOW)

    @property
    def suspected_since(self) -> int | None:
        """The first of the steps that are a spike if it lasts; None if losses are as usual."""
        return self._suspicion[0][0] if self._suspicion else None

    def observe(self, lines: Iterable[Mapping[str, Any]]) -> Spike | None:
        """The spike that lines of metrics.jsonl complete."""
        spike = None
        for line in lines:
            # With an overflow the loss scale was too large; it says nothing of data or weights.
            if line["kind"] == "train" and not line.get("overflowed"):
                self._skipped.append((line["step"], line["skipped"]))
                loss = None if line["skipped"] else line["loss"]
                spike = self._observe_step(line["step"], loss) or spike
        return spike

    def too_many_skipped(self, ends_run: bool) -> Spike | None:
        """The last WINDOW updates, or all of a run that ends before, if too many were skipped."""
        steps = list(self._skipped)
        skipped = sum(was_skipped for _, was_skipped in steps)
        is_known = self._threshold and (len(steps) == WINDOW or ends_run)
        if not is_known or skipped <= MOST_SKIPPED * len(steps):
            return None
        return Spike(first_step=steps[0][0], last_step=steps[-1][0], skipped=skipped)

    def _observe_step(self, step: int, loss: float | None) -> Spike | None:
        if step - 1 in self._data_changes:
            self._usual.clear()
            self._suspicion.clear()
        if not self._is_suspect(step, loss):
            self._suspicion.clear()
            if loss is not None:
                self._usual.append(loss)
            return None
        self._suspicion.append((step, loss))
        if len(self._suspicion) < SPIKE_STEPS:
            return None
        return Spike(
            first_step=self._suspicion[0][0],
            last_step=step,
            loss=max((each for _, each in self._suspicion if each is not None), default=None),
            usual=statistics.median(self._usual) if self._usual else None,
        )

    def _is_suspect(self, step: int, loss: float | None) -> bool:
        threshold = self._threshold
        if not threshold or step <= self._warmup_steps:
            return False
        if loss is None:
            return True
        if len(self._usual) < WINDOW:
            return False
        if self._suspicion:
            threshold *= STILL_ABOVE
        median = statistics.median(self._usual)
        absolute_deviation = statistics.median(abs(each - median) for each in self._usual)
        deviation = max(DEVIATIONS_PER_MAD * absolute_deviation, LEAST_DEVIATION * median)
        return loss - median > threshold * deviation
