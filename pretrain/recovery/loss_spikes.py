"""Loss spikes: how all ranks learn of one at the same step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foundation.errors import TrainingError
from pretrain.config.run import RunConfig
from pretrain.distributed.world import World, broadcast_value
from pretrain.recovery import spike_detector
from pretrain.recovery.spike_detector import Spike, detector_of
from pretrain.rundir.events import GaveUp
from pretrain.rundir.metrics_file import (
    is_longer_than_its_end,
    latest_measurements,
    measurements_of,
)
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState

# What is usual follows from the last window of losses. A detector that starts so many windows back
# has forgotten by now where it started.
WINDOWS_READ = 20


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
        self._detector = detector_of(run)
        self._skipped: deque[tuple[int, bool]] = deque(maxlen=spike_detector.WINDOW)
        if world.is_main:
            measured = _last_steps(run_dir.metrics, WINDOWS_READ * spike_detector.WINDOW)
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
        found = broadcast_value(found, Spike | GaveUp | None)
        if isinstance(found, Spike):
            raise SpikeFound(found)
        if found is None:
            return
        if self._world.is_main:
            self._run_dir.ledger.append(found)
        raise TrainingError(self._report(found))

    def _observe(self, lines: Iterable[dict[str, Any]]) -> Spike | None:
        found = None
        for line in lines:
            if line.get("overflowed"):
                continue
            self._skipped.append((line["step"], line["skipped"]))
            found = self._detector.observe_line(line) or found
        return found

    def _too_many_skipped(self, ends_run: bool) -> GaveUp | None:
        """The event, if the last WINDOW updates, or all of a shorter run, were skipped so."""
        steps, allowed = list(self._skipped), self._run.recovery.max_skipped_fraction
        skipped = sum(was_skipped for _, was_skipped in steps)
        enough = len(steps) == spike_detector.WINDOW or ends_run
        if not enough or skipped <= allowed * len(steps):
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


def _last_steps(metrics: Path, least: int) -> list[dict[str, Any]]:
    """Return the lines of steps at the end of metrics.jsonl, oldest first: all of them, or from a
    long file at least so many. To read those of 500,000 steps would keep every rank waiting."""
    lines = [line for line in latest_measurements(metrics) if line["kind"] == "train"]
    if len(lines) < least and is_longer_than_its_end(metrics):
        return [line for line in measurements_of(metrics) if line["kind"] == "train"]
    return lines[::-1]
