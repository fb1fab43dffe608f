"""What rank 0 writes of a run's metrics: lines of metrics.jsonl, TensorBoard, a profiler trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from data_pipeline.files import fsync_directory
from pretrain.rundir.run_dir import RunDir

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

NOT_DRAWN = ("kind", "step", "time")


class MetricsFiles:
    """metrics.jsonl and TensorBoard. Metrics after `step` are removed: those steps are repeated.

    `may_write` is called before each write; it raises UserError in an attempt that another one has
    replaced.
    """

    def __init__(
        self, run_dir: RunDir, step: int, tensorboard: bool, may_write: Callable[[], None]
    ) -> None:
        self._path = run_dir.metrics
        self._may_write = may_write
        run_dir.cut_metrics_after(step)
        self._tensorboard = _open_tensorboard(run_dir, step) if tensorboard else None

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write the lines; TensorBoard names `loss` in a line of kind `train` `train/loss`."""
        self._may_write()
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        if self._tensorboard is None:
            return
        for line in lines:
            for name, value in line.items():
                if name not in NOT_DRAWN and value is not None:
                    self._tensorboard.add_scalar(f"{line['kind']}/{name}", value, line["step"])
        self._tensorboard.flush()

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def _open_tensorboard(run_dir: RunDir, step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    # What a killed run logged after its checkpoint is repeated, so TensorBoard is to drop it.
    return SummaryWriter(str(run_dir.tensorboard), purge_step=step + 1 if step else None)


class StepProfiler:
    """Profiles steps `first` to `last`, counted from 1, of rank 0; zeros: none.

    Writes DIRECTORY/steps-00000010-00000012.json.gz, for ui.perfetto.dev or chrome://tracing.
    """

    def __init__(self, first: int, last: int, directory: Path) -> None:
        self._first, self._last = first, last
        self._path = directory / f"steps-{first:08d}-{last:08d}.json.gz"
        self._profile: profile | None = None

    def after_step(self, step: int) -> None:
        """Start or end the recording if `step`, the latest one, is the one before or the last."""
        if self._profile is not None and step == self._last:
            self.close()
        if self._first and step == self._first - 1:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def close(self) -> None:
        """Write what was recorded, if a recording is in progress."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._path))
        fsync_directory(self._path.parent)
        logger.info("profiler trace of steps %d to %d: %s", self._first, self._last, self._path)
