"""What counts as a loss spike: a pure function of the losses, so all who ask agree. Torch-free."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.config.run import RecoveryConfig, RunConfig
from pretrain.rundir.events import describe_spike

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


@dataclass(frozen=True)
class Spike:
    """Steps in a row, up to the latest, with anomalous losses or skipped updates."""

    first_step: int
    last_step: int
    loss: float | None  # the highest; None if every step was skipped
    usual: float | None  # the median before

    def describe(self) -> str:
        return describe_spike(self.first_step, self.last_step, self.loss, self.usual)


class SpikeDetector:
    """Takes every step in order. Later losses are compared with those that were not anomalous.

    Losses are compared with those of the same data only: the history starts again after each of
    `data_changes`, which counts the updates before a change. Up to the end of the warm-up of the
    learning rate, and before WINDOW losses are known, no loss is anomalous.
    """

    def __init__(
        self, settings: RecoveryConfig, warmup_steps: int = 0, data_changes: Collection[int] = ()
    ) -> None:
        self._threshold = settings.spike_threshold
        self._warmup_steps = max(warmup_steps, WINDOW)
        self._data_changes = data_changes
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._suspicion: list[tuple[int, float | None]] = []

    @property
    def suspected_since(self) -> int | None:
        """The first of the steps that are a spike if it lasts; None if losses are as usual."""
        return self._suspicion[0][0] if self._suspicion else None

    def observe_line(self, line: Mapping[str, Any]) -> Spike | None:
        """The spike that a line of metrics.jsonl, of kind `train`, completes."""
        if line.get("overflowed"):
            return None  # the loss scale was too large, which says nothing of data or weights
        return self.observe(line["step"], None if line["skipped"] else line["loss"])

    def observe(self, step: int, loss: float | None) -> Spike | None:
        """The spike that this step completes; `loss` is None for a skipped step."""
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
        losses = [each for _, each in self._suspicion if each is not None]
        usual = statistics.median(self._usual) if self._usual else None
        return Spike(self._suspicion[0][0], step, max(losses, default=None), usual)

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


def detector_of(run: RunConfig) -> SpikeDetector:
    """Return the detector of a run that has measured nothing yet."""
    changes = [phase.from_step for phase in run.data.phases]
    return SpikeDetector(run.recovery, run.optim.schedule.warmup_steps, changes)


def suspected_since(run: RunConfig, measured: Iterable[Mapping[str, Any]], step: int) -> int | None:
    """Return the first of the steps before or at `step` that are a spike if it lasts, by the lines
    of metrics.jsonl."""
    detector = detector_of(run)
    for line in measured:
        if line["kind"] == "train" and line["step"] <= step:
            detector.observe_line(line)
    return detector.suspected_since
