"""A run's mirror: its published checkpoints, uploaded from the run directory while it trains.

An upload is a `Transfer` as a save is: each rank puts its share of the files into the store, in a
thread, and reports; then rank 0 uploads what makes the checkpoint count. No step waits for a store.
If any rank fails, the upload has failed; after a pause the latest checkpoint is uploaded, of which
the store may have some files already.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from foundation.retry import Outage, Patience
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.background_save import RankReports, Report, Transfer
from pretrain.checkpoint.destinations import Disk, ObjectStore, Publication, StoredCheckpoint
from pretrain.checkpoint.marker import read_index
from pretrain.config.run import RunConfig
from pretrain.distributed.rounds import Worker
from pretrain.distributed.world import World, on_any_rank

logger = logging.getLogger(__name__)
WAIT_SECONDS = 60.0  # of a run that ends or stops, for its last upload
POLL_SECONDS = 0.1


def location(run: RunConfig) -> str:
    """The URL of the run's mirror; '' if it has none."""
    base = run.checkpoint.mirror.rstrip("/")
    return f"{base}/{run.name}" if base else ""


class Upload(Transfer):
    """A rank's part of uploading the checkpoint in `directory`."""

    def __init__(
        self, directory: Path, reports: RankReports, store: ObjectStore, publication: Publication
    ) -> None:
        super().__init__(int(directory.name.removeprefix("step-")), reports)
        self._directory, self._store, self._publication = directory, store, publication
        self.started = time.monotonic()

    def _put(self) -> tuple[Report, dict[str, object]]:
        self._publication.read()  # another run's folder gets no files
        contents = sorted(read_index(self._directory).files.items())
        folder = StoredCheckpoint.of(self._directory).folder
        for name, content in contents[self._reports.rank :: self._reports.num_ranks]:
            self._store.put(f"{folder}/{name}", self._directory / name, content, self.check)
        return {}, {}

    def _publish(self, reports: list[Report]) -> None:
        self._publication.publish(self._directory, self.check)


class Mirror:
    """Uploads checkpoints of one start of a run. All ranks call `agree` and `finish` together.

    They are those of `disk`; the store has `uploaded_step`, or nothing (0), as the run resumes from
    it. `note` is told, on rank 0, the seconds that the upload of a step took, or why the step is
    not in the store. A context manager: leaving it cancels an upload in progress, which the next
    start continues. Nothing here raises what a store does.
    """

    def __init__(
        self,
        config: RunConfig,
        disk: Disk,
        world: World,
        resumed_step: int,
        uploaded_step: int,
        note: Callable[[int, float | str], None],
    ) -> None:
        self.url, self._settings = location(config), config.checkpoint
        self._disk, self._world, self._note_step = disk, world, note
        self._stored_step, self._last_step = uploaded_step, resumed_step
        self._upload: Upload | None = None  # on rank 0: that is in progress
        self._uploads = 0  # that were started
        self._failure = ""  # of the last upload
        if self.url:
            self._scratch = tempfile.TemporaryDirectory(
                prefix="xl-pretrain-mirror-", ignore_cleanup_errors=True
            )
            self._store = ObjectStore(self.url, Path(self._scratch.name))
            self._publication = Publication(self._store, disk, resumed_step, self._settings)
            self._outage, self._worker = Outage(Patience(math.inf)), Worker("mirror")

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.url:
            if self._upload is not None:
                self._upload.stop()  # without waiting: a store that is silent would delay the run
            self._worker.end()
            self._scratch.cleanup()

    def held(self) -> Collection[int]:
        """The step whose files on disk are needed (rank 0)."""
        return () if self._upload is None else (self._upload.step,)

    def is_due(self, published_step: int) -> bool:
        """Whether the checkpoint of this step is to be uploaded now, which rank 0 decides.

        `published_step` is 0 where the rank does not know of a published one.
        """
        if not self._lacks(published_step) or self._upload is not None:
            return False
        return not self._failure or self._outage.is_due

    def _lacks(self, step: int) -> bool:
        """Whether the store has another step than this one, as far as rank 0 knows."""
        return bool(self.url) and self._world.is_main and step not in (0, self._stored_step)

    def agree(self, is_due: bool, last_step: int) -> None:
        """Upload the last save, that of `last_step`, if rank 0 has found that it `is_due`."""
        if not self.url:
            return
        self._last_step = last_step
        if self._world.is_main:
            self._note()
        if not is_due:
            return
        if self._upload is not None:
            self._upload.stop()  # rank 0 knows of another rank that failed
        self._uploads += 1
        name = f"{self._disk.attempt}/upload/{self._uploads}"
        self._upload = Upload(
            files.step_directory(self._disk.root, last_step),
            RankReports(name, self._world.rank, self._world.world_size),
            self._store,
            self._publication,
        )
        self._worker.add(self._upload.run)  # after the one before: two would write the same files

    def _note(self) -> None:
        """Note what has become of the upload, and the first of failures in a row."""
        if self._upload is None or not self._upload.is_ended:
            return
        upload, self._upload = self._upload, None
        if upload.is_published:
            self._note_step(upload.step, round(time.monotonic() - upload.started, 1))
            self._stored_step, self._failure = upload.step, ""
            self._outage.ended()
        elif upload.problem is not None:
            self._outage.failed(upload.problem.text, "training continues")
            if not self._failure:
                self._note_step(upload.step, upload.problem.text)
            self._failure = upload.problem.text

    def finish(
        self,
        while_waiting: Callable[[], None] = lambda: None,
        stop_requests: Callable[[], int] = lambda: 0,
    ) -> None:
        """Return when the last checkpoint, which is published, is in the store, or time is over.

        A request to stop ends the wait.
        """
        if not self.url:
            return
        step = self._last_step
        deadline = time.monotonic() + WAIT_SECONDS
        before, is_over = stop_requests(), False
        while True:
            own = [self._lacks(step), self.is_due(step), is_over]
            is_lacking, is_due, is_over = on_any_rank(own)
            self.agree(is_due, step)
            if not is_lacking:
                return
            if is_over:
                break
            while_waiting()
            time.sleep(POLL_SECONDS)
            is_over = time.monotonic() > deadline or stop_requests() > before
        if self._world.is_main:
            failure = f" ({self._failure})" if self._failure else ""
            reason = f"not uploaded when the run ended{failure}"
            self._note_step(step, reason)
            what = "the checkpoint of step %d is not in %s: %s; it is on disk"
            logger.warning(what, step, self.url, reason)
