"""Loss spikes: what counts as one, and how all ranks learn of it at the same step."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pretrain.config.run import RecoveryConfig, RunConfig
from pretrain.distributed.world import World, any_rank, broadcast_object
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import describe_spike
from pretrain.state import TrainState

MIN_HISTORY = 10  # losses to compare with, before any is called anomalous
# The smallest deviation to assume, as a fraction of the median: where losses hardly vary, a small
# rise is no spike.
LEAST_DEVIATION = 0.01
DEVIATIONS_PER_MAD = 1.4826  # standard deviations per median absolute deviation, normally


@dataclass(frozen=True)
class Spike:
    """Steps in a row, up to the latest, with anomalous losses or skipped updates."""

    first_step: int
    last_step: int
    loss: float | None  # the highest; None if every step was skipped
    usual: float | None  # the median before

    def describe(self) -> str:
        return describe_spike(self.first_step, self.last_step, self.loss, self.usual)


class SpikeFound(Exception):
    """Raised on every rank at the same step."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(spike.describe())
        self.spike = spike


class SpikeMonitor:
    """Watches the losses of a run. Its history is metrics.jsonl, so a resumed run decides alike."""

    def __init__(self, run: RunConfig, run_dir: RunDir, world: World, state: TrainState) -> None:
        self._detector = SpikeDetector(run.recovery)
        if world.is_main:
            measured = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
            self._observe(line for line in measured if line["step"] <= state.step)

    def check(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take the metrics of new steps (on rank 0); raise SpikeFound on all ranks at a spike."""
        spike = self._observe(lines)
        if any_rank(spike is not None):
            raise SpikeFound(broadcast_object(spike))  # type: ignore[arg-type]  (rank 0 has it)

    def _observe(self, lines: Iterable[dict[str, Any]]) -> Spike | None:
        found = None
        for line in lines:
            if line.get("overflowed"):
                continue  # the loss scale was too large, which says nothing of data or weights
            loss = None if line["skipped"] else line["loss"]
            found = self._detector.observe(line["step"], loss) or found
        return found


class SpikeDetector:
    """Takes every step in order. Later losses are compared with those that were not anomalous."""

    def __init__(self, settings: RecoveryConfig) -> None:
        self._settings = settings
        self._usual: deque[float] = deque(maxlen=settings.window)
        self._anomalous: list[tuple[int, float | None]] = []

    def observe(self, step: int, loss: float | None) -> Spike | None:
        """The spike that this step completes; `loss` is None for a skipped step."""
        if loss is not None and not self._is_anomalous(loss):
            self._usual.append(loss)
            self._anomalous.clear()
            return None
        self._anomalous.append((step, loss))
        settings = self._settings
        if len(self._anomalous) < settings.spike_steps or not settings.spike_threshold:
            return None
        losses = [each for _, each in self._anomalous if each is not None]
        usual = statistics.median(self._usual) if self._usual else None
        return Spike(self._anomalous[0][0], step, max(losses, default=None), usual)

    def _is_anomalous(self, loss: float) -> bool:
        if len(self._usual) < MIN_HISTORY or not self._settings.spike_threshold:
            return False
        median = statistics.median(self._usual)
        absolute_deviation = statistics.median(abs(each - median) for each in self._usual)
        deviation = max(DEVIATIONS_PER_MAD * absolute_deviation, LEAST_DEVIATION * median)
        return loss - median > self._settings.spike_threshold * deviation
