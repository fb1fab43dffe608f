"""A profiler trace of some steps of rank 0, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from data_pipeline.files import fsync_directory

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records steps `first` to `last`, counted from 1, into DIRECTORY/steps-00000010-00000012.json.gz; 0: none."""

    def __init__(self, first: int, last: int, directory: Path) -> None:
        self._first, self._last = first, last
        self._path = directory / f"steps-{first:08d}-{last:08d}.json.gz"
        self._profile: profile | None = None

    def after_step(self, step: int) -> None:
        """Begin or end the recording where `step`, the last one made, is its border."""
        if self._profile is not None and step == self._last:
            self.close()
        if self._first and step == self._first - 1:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def close(self) -> None:
        """Write what was recorded, if a recording is under way."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._path))
        fsync_directory(self._path.parent)
        logger.info("profiler trace of steps %d to %d: %s", self._first, self._last, self._path)
