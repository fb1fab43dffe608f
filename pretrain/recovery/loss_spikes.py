"""Loss spikes: what counts as one, and how all ranks learn of it at the same step."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import TrainingError
from pretrain.config.run import RecoveryConfig, RunConfig
from pretrain.distributed.world import World, any_rank, broadcast_value
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import GaveUp, describe_spike
from pretrain.state import TrainState

# The smallest deviation to assume, as a fraction of the median: where losses hardly vary, a small
# rise is no spike.
LEAST_DEVIATION = 0.01
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


class SpikeFound(Exception):
    """Raised on every rank at the same step."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(spike.describe())
        self.spike = spike


class SpikeMonitor:
    """Watches losses and skipped updates of a run.

    Its history is metrics.jsonl, so a resumed run decides alike.
    """

    def __init__(self, run: RunConfig, run_dir: RunDir, world: World, state: TrainState) -> None:
        self._run = run
        self._run_dir = run_dir
        self._world = world
        changes = [phase.from_step for phase in run.data.phases]
        self._detector = SpikeDetector(run.recovery, run.optim.schedule.warmup_steps, changes)
        self._skipped: deque[tuple[int, bool]] = deque(maxlen=run.recovery.window)
        if world.is_main:
            measured = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
            self._observe(line for line in measured if line["step"] <= state.step)

    @property
    def suspected_since(self) -> int | None:
        """The first step of what may become a spike, on rank 0; a save keeps a checkpoint from
        before it."""
        return self._detector.suspected_since

    def check(self, lines: Iterable[dict[str, Any]], ends_run: bool = False) -> None:
        """Take the metrics of new steps (on rank 0); raise SpikeFound on all ranks at a spike.

        Raises TrainingError on all ranks if too many of the last updates were skipped.
        """
        found = self._observe(lines) or self._too_many_skipped(ends_run)
        if not any_rank(found is not None):
            return
        found = broadcast_value(found, Spike | GaveUp | None)
        if isinstance(found, Spike):
            raise SpikeFound(found)
        if self._world.is_main:
            self._run_dir.ledger.append(found)  # type: ignore[arg-type]  (some rank found it)
        raise TrainingError(self._report(found))  # type: ignore[arg-type]

    def _observe(self, lines: Iterable[dict[str, Any]]) -> Spike | None:
        found = None
        for line in lines:
            if line.get("overflowed"):
                continue  # the loss scale was too large, which says nothing of data or weights
            self._skipped.append((line["step"], line["skipped"]))
            loss = None if line["skipped"] else line["loss"]
            found = self._detector.observe(line["step"], loss) or found
        return found

    def _too_many_skipped(self, ends_run: bool) -> GaveUp | None:
        """The event, if the last `window` updates, or all of a shorter run, were skipped so."""
        steps, recovery = list(self._skipped), self._run.recovery
        skipped = sum(was_skipped for _, was_skipped in steps)
        enough = len(steps) == recovery.window or ends_run
        if not enough or skipped <= recovery.max_skipped_fraction * len(steps):
            return None
        return GaveUp(first_step=steps[0][0], step=steps[-1][0], skipped=skipped)

    def _report(self, found: GaveUp) -> str:
        limit = self._run.recovery.skip_grad_norm
        larger = f" or above recovery.skip_grad_norm={limit:g}" if limit else ""
        return (
            f"{found.spike}, their gradients were not finite{larger}; found more than "
            f"recovery.max_skipped_fraction={self._run.recovery.max_skipped_fraction:g} of the "
            "updates, so the run does not learn; lower optim.learning_rate or clean the data"
        )


class SpikeDetector:
    """Takes every step in order. Later losses are compared with those that were not anomalous.

    Losses are compared with those of the same data only: the history starts again after each of
    `data_changes`, which counts the updates before a change. Up to the end of the warm-up of the
    learning rate, and before `window` losses are known, no loss is anomalous.
    """

    def __init__(
        self, settings: RecoveryConfig, warmup_steps: int = 0, data_changes: Collection[int] = ()
    ) -> None:
        self._settings = settings
        self._warmup_steps = max(warmup_steps, settings.window)
        self._data_changes = data_changes
        self._usual: deque[float] = deque(maxlen=settings.window)
        self._suspicion: list[tuple[int, float | None]] = []

    @property
    def suspected_since(self) -> int | None:
        """The first of the steps that are a spike if it lasts; None if losses are as usual."""
        return self._suspicion[0][0] if self._suspicion else None

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
        if len(self._suspicion) < self._settings.spike_steps:
            return None
        losses = [each for _, each in self._suspicion if each is not None]
        usual = statistics.median(self._usual) if self._usual else None
        return Spike(self._suspicion[0][0], step, max(losses, default=None), usual)

    def _is_suspect(self, step: int, loss: float | None) -> bool:
        threshold = self._settings.spike_threshold
        if not threshold or step <= self._warmup_steps:
            return False
        if loss is None:
            return True
        if len(self._usual) < self._settings.window:
            return False
        if self._suspicion:
            threshold *= STILL_ABOVE
        median = statistics.median(self._usual)
        absolute_deviation = statistics.median(abs(each - median) for each in self._usual)
        deviation = max(DEVIATIONS_PER_MAD * absolute_deviation, LEAST_DEVIATION * median)
        return loss - median > threshold * deviation
