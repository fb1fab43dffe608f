"""What rank 0 writes of a run's metrics: lines of metrics.jsonl, TensorBoard, a profiler trace."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from foundation.errors import os_error_text, remedy_of
from foundation.files import append_whole, fsync_directory
from foundation.retry import Outage, Patience, outlast
from pretrain.rundir.metric_names import scalars_of
from pretrain.rundir.metrics_file import summarize_file, sums_of
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)


class MetricsFiles:
    """metrics.jsonl and TensorBoard. Metrics after `step` are removed: those steps are repeated.

    `may_write` is called before each write; it raises UserError in an attempt that another one has
    replaced. While storage fails, lines are kept in memory and written together with later ones;
    StorageError once the patience of `run_dir` is over.
    """

    def __init__(
        self, run_dir: RunDir, step: int, tensorboard: bool, may_write: Callable[[], None]
    ) -> None:
        self._may_write = may_write
        outlast(run_dir.patience, lambda: run_dir.cut_metrics_after(step))
        self._sums = sums_of(summarize_file(run_dir.metrics))
        self._files = [_Buffered(run_dir.metrics, run_dir.patience)]
        self._tensorboard: TensorBoardEvents | None = None
        if tensorboard:
            self._tensorboard = TensorBoardEvents()
            file = _Buffered(run_dir.tensorboard / self._tensorboard.file_name, run_dir.patience)
            file.add(self._tensorboard.start(step))
            self._files.append(file)

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write the lines; the last one of an interval with the run's sums until then."""
        for line in lines:
            self._sums.add(line)
            if "tokens_per_second" in line:
                line["totals"] = {name: round(each, 6) for name, each in vars(self._sums).items()}
        self._files[0].add("".join(json.dumps(line) + "\n" for line in lines).encode())
        if self._tensorboard is not None:
            self._files[1].add(self._tensorboard.scalars(lines))
        self.write()

    def write(self) -> str:
        """Write what is left in memory; returns why that failed, or ''."""
        return next(filter(None, [file.write(self._may_write) for file in self._files]), "")

    def require_written(self) -> None:
        """Raise OSError if anything is left in memory after trying once more."""
        if problem := self.write():
            raise OSError(problem)


class _Buffered:
    """A file to append to, and what could not be appended yet."""

    def __init__(self, path: Path, patience: Patience) -> None:
        self._path = path
        self._outage = Outage(patience)
        self._left = b""

    def add(self, content: bytes) -> None:
        self._left += content

    def write(self, may_write: Callable[[], None]) -> str:
        if not self._left:
            return ""
        try:
            may_write()
            self._path.parent.mkdir(exist_ok=True)
            append_whole(self._path, self._left)
        except OSError as error:
            problem = os_error_text(error)
            meanwhile = "training continues, keeps metrics in memory"
            self._outage.failed(problem, meanwhile, remedy_of(error))
            if self._outage.is_over_patience:
                raise self._outage.error() from error
            return problem
        self._outage.ended()
        self._left = b""
        return ""


class TensorBoardEvents:
    """Scalars as TensorBoard's event files have them.

    Its own writer appends from a thread, which after one failed write never writes again.
    """

    def __init__(self) -> None:
        # TensorBoard reads files in the order of their names.
        now, host = time.time(), socket.gethostname()
        self.file_name = f"events.out.tfevents.{now:017.6f}.{host}.{os.getpid()}"

    def start(self, step: int) -> bytes:
        """What a file starts with. What a killed run logged after `step` is dropped."""
        start = _record(file_version="brain.Event:2")
        return start + _record(step=step + 1, session_log={"status": "START"}) if step else start

    def scalars(self, lines: Sequence[dict[str, Any]]) -> bytes:
        """What the lines have measured."""
        from torch.utils.tensorboard.summary import scalar

        return b"".join(
            _record(step=line["step"], summary=scalar(name, value))
            for line in lines
            for name, value in scalars_of(line).items()
        )


def _record(**fields: Any) -> bytes:
    """An event of now, as a record of an event file."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    # its classes are made when it is imported
    event = event_pb2.Event(wall_time=time.time(), **fields)  # pyright: ignore[reportAttributeAccessIssue]
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


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
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=self._path.parent, prefix=".") as beside:
                written = Path(beside) / self._path.name
                recorded.export_chrome_trace(str(written))
                written.replace(self._path)
            fsync_directory(self._path.parent)
        except OSError as error:  # not worth ending or delaying a run
            logger.warning("no profiler trace: %s", os_error_text(error))
            return
        logger.info("profiler trace of steps %d to %d: %s", self._first, self._last, self._path)
