"""What rank 0 writes of a run's metrics: lines of metrics.jsonl, TensorBoard, a profiler trace."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import profile

from foundation.errors import os_error_text, remedy_of
from foundation.files import append_whole, own_file
from foundation.typed_values import json_text
from pretrain.checkpoint.storage_retry import WriteFailures, with_retries
from pretrain.rundir.metric_names import dashboard_values
from pretrain.rundir.metrics_file import cut_measurements_after, summarize_file
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)


class MetricsFile:
    """metrics.jsonl. Lines after `step` are removed first, because those steps are repeated.

    `may_write` is called before each write, and raises UserError in an attempt that was replaced.
    While storage fails, lines wait in host memory and are written with later ones. StorageError
    once this has lasted as long as `run_dir.retry` allows.
    """

    def __init__(self, run_dir: RunDir, step: int, may_write: Callable[[], None]) -> None:
        self._path, self._may_write = run_dir.metrics, may_write
        with_retries(run_dir.retry, lambda: cut_measurements_after(run_dir.metrics, step))
        self._spent = summarize_file(run_dir.metrics).spent
        self._failures = WriteFailures(run_dir.retry)
        self._left = b""  # what could not be written yet

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write the lines; add the run's totals until then to the last line of an interval."""
        for line in lines:
            self._spent.add(line)
            if "tokens_per_second" in line:
                line["totals"] = {
                    name: round(total, 6) for name, total in vars(self._spent).items()
                }
        self._left += "".join(json_text(line) + "\n" for line in lines).encode()
        self.write()

    def write(self) -> str:
        """Write the lines that wait; return why that failed, or ''."""
        if not self._left:
            return ""
        try:
            self._may_write()
            append_whole(self._path, self._left)
        except OSError as error:
            problem = os_error_text(error)
            meanwhile = "training continues, keeps metrics in memory"
            self._failures.failed(problem, meanwhile, remedy_of(error))
            if self._failures.is_over_limit:
                raise self._failures.error() from error
            return problem
        self._failures.ended()
        self._left = b""
        return ""


class TensorBoard:
    """A copy of metrics.jsonl in event files. What a killed run logged after `step` is dropped.

    Lines whose write fails are missing there, and later lines start another file. The library's own
    writer is not used, because it never writes again after one failure.
    """

    def __init__(self, directory: Path, step: int) -> None:
        self._directory, self._step = directory, step
        self._records: Any = None  # the library's, of the current file

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        from torch.utils.tensorboard.summary import scalar

        try:
            if self._records is None:
                self._start()
            for line in lines:
                for name, value in dashboard_values(line).items():
                    self._write(step=line["step"], summary=scalar(name, value))
        except OSError as error:
            logger.warning("TensorBoard lacks these steps: %s", os_error_text(error))
            self.close()

    def close(self) -> None:
        """Close the current file; the next lines start another."""
        records, self._records = self._records, None
        if records is not None:
            with contextlib.suppress(OSError):  # some file systems report a failed write again
                records.close()

    def _start(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(
            open(self._directory / name, "wb", buffering=0, opener=own_file)  # noqa: SIM115
        )
        self._write(file_version="brain.Event:2")
        if self._step:
            self._write(step=self._step + 1, session_log={"status": "START"})
            self._step = 0

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        # pyright cannot see its classes, which are made when it is imported.
        event = event_pb2.Event(wall_time=time.time(), **fields)  # pyright: ignore[reportAttributeAccessIssue]
        self._records.write(event.SerializeToString())


class StepProfiler:
    """Profiles steps `first` to `last`, counted from 1, of rank 0; zeros: none.

    Writes DIRECTORY/steps-00000010-00000012.json.gz, for ui.perfetto.dev or chrome://tracing.
    """

    def __init__(self, first: int, last: int, directory: Path) -> None:
        self._first, self._last = first, last
        self._path = directory / f"steps-{first:08d}-{last:08d}.json.gz"
        self._profile: profile | None = None

    def after_step(self, step: int) -> None:
        """Take the step that has ended: start or end the recording after it."""
        if self._profile is not None and step == self._last:
            self.close()
        if self._first and step == self._first - 1:
            self._profile = profile()  # of everything that the device supports
            self._profile.start()

    def close(self) -> None:
        """Write what was recorded, if a recording is in progress."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._path))
        except OSError as error:  # a trace is not worth ending or delaying a run
            logger.warning("no profiler trace: %s", os_error_text(error))
            return
        logger.info("profiler trace of steps %d to %d: %s", self._first, self._last, self._path)
