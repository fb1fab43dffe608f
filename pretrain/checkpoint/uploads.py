"""A run's mirror: its published checkpoints, uploaded from the run directory while it trains.

An upload is a `Transfer` as a save is: each rank puts its share of the files into the store, in a
thread, and reports; then rank 0 uploads what makes the checkpoint count. No step waits for a store.
One that fails is tried again until there is a newer checkpoint to upload instead.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from foundation.retry import Outage, Patience
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.background_save import (
    RankReports,
    Report,
    SaveCanceled,
    SaveProblem,
    Transfer,
)
from pretrain.checkpoint.destinations import Check, Disk, ObjectStore, Publication
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


def share_of_rank(names: Iterable[str], rank: int, num_ranks: int) -> list[str]:
    """Return the files that a rank uploads: ranks that each take theirs upload all, each once."""
    return sorted(names)[rank::num_ranks]


class Upload(Transfer):
    """A rank's part of uploading the checkpoint in `directory`; a failure is tried again."""

    def __init__(
        self,
        directory: Path,
        reports: RankReports,
        store: ObjectStore,
        publication: Publication,
        outage: Outage,
    ) -> None:
        super().__init__(int(directory.name.removeprefix("step-")), reports)
        self._directory, self._store, self._publication = directory, store, publication
        self._outage = outage
        self.failure = ""  # of the last try
        self.started = time.monotonic()

    @property
    def any_failure(self) -> str:
        """Why it fails at the moment, on whichever rank."""
        if own := self.failure or (self._problem.text if self._problem else ""):
            return own
        return "see the logs of other ranks" if self._reports.count_failing() else ""

    def _put(self) -> tuple[Report, dict[str, Any]]:
        def put() -> None:
            self._publication.read()  # another run's folder gets no files
            rank, num_ranks = self._reports.rank, self._reports.num_ranks
            upload_share(self._store, self._directory, rank, num_ranks, self.check)

        self._again(put)
        return {}, {}

    def _publish(self, reports: list[Report]) -> None:
        self._again(lambda: self._publication.publish(self._directory, self.check))

    def _again(self, task: Callable[[], None]) -> None:
        """Do the task until it succeeds; SaveCanceled once that is not wanted any more."""
        while True:
            try:
                task()
                break
            except SaveCanceled:
                raise
            except Exception as error:  # whatever it is, the run goes on
                self.check()  # the files may be gone that it still had open
                self._reports.count_failing(not self.failure)
                self.failure = SaveProblem.of(error).text
                self._outage.failed(self.failure, "training continues")
            while not self._outage.is_due:
                self.check()
                time.sleep(POLL_SECONDS)
        self._reports.count_failing(-bool(self.failure))
        self._outage.ended()
        self.failure = ""


def upload_share(
    store: ObjectStore, directory: Path, rank: int, num_ranks: int, check: Check
) -> None:
    """Upload a rank's share of the files that the checkpoint's index lists."""
    found = read_index(directory)
    for name in share_of_rank(found.files, rank, num_ranks):
        store.put(found.step, name, directory / name, check)


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
        self._step, self._last_step = uploaded_step, resumed_step
        self._upload: Upload | None = None
        self._uploads = 0  # that were started
        self._is_noted = True  # what became of the upload
        self._is_failure_noted = False  # the one that lasts
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

    @property
    def _is_busy(self) -> bool:
        return self._upload is not None and not self._upload.is_ended

    def held(self) -> Collection[int]:
        """The step whose files on disk are needed."""
        return (self._step,) if self._is_busy else ()

    def is_due(self, published_step: int) -> bool:
        """Whether the checkpoint of this step is to be uploaded now, which rank 0 decides.

        `published_step` is 0 where the rank does not know of a published one.
        """
        if not self.url or not self._world.is_main or published_step in (0, self._step):
            return False
        return not self._is_busy or bool(self._upload and self._upload.any_failure)

    def agree(self, is_due: bool, last_step: int) -> None:
        """Upload the last save, that of `last_step`, if rank 0 has found that it `is_due`."""
        if not self.url:
            return
        self._last_step = last_step
        self._note()
        if not is_due:
            return
        if self._upload is not None:
            self._upload.stop()
        self._step, self._uploads, self._is_noted = last_step, self._uploads + 1, False
        name = f"{self._disk.attempt}/upload/{self._uploads}"
        self._upload = Upload(
            files.step_directory(self._disk.root, last_step),
            RankReports(name, self._world.rank, self._world.world_size),
            self._store,
            self._publication,
            self._outage,
        )
        self._worker.add(self._upload.run)  # after the one before: two would write the same files

    def _note(self) -> None:
        """Note, on rank 0, what has become of the upload, and the first of failures that last."""
        upload = self._upload
        if upload is None or self._is_noted or not self._world.is_main:
            return
        if upload.is_published:
            self._note_step(upload.step, round(time.monotonic() - upload.started, 1))
            self._is_noted, self._is_failure_noted = True, False
        elif not self._is_failure_noted and (failure := upload.any_failure):
            self._note_step(upload.step, failure)
            self._is_failure_noted = True

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
            own = [self._is_busy, self.is_due(step), is_over]
            is_busy, is_due, is_over = on_any_rank(own)
            self.agree(is_due, step)
            if not is_busy and not is_due:
                return
            if is_over:
                break
            while_waiting()
            time.sleep(POLL_SECONDS)
            is_over = time.monotonic() > deadline or stop_requests() > before
        if self._world.is_main:
            failure = self._upload.any_failure if self._upload else ""
            reason = f"not uploaded when the run ended{f' ({failure})' if failure else ''}"
            self._note_step(step, reason)
            what = "the checkpoint of step %d is not in %s: %s; it is on disk"
            logger.warning(what, step, self.url, reason)
