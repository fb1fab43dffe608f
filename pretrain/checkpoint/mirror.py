"""The mirror of a run: uploads of its published checkpoints to an object store.

An upload is a `Transfer`, like a save: each rank uploads its share of a published checkpoint in a
thread and reports; then rank 0 uploads index, marker and mirror.json. No training step waits for a
store. If any rank fails, the upload has failed; after a pause the checkpoint that is then the
latest is uploaded, without the files that the store already has.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from data_pipeline.corpora.fetch import NotFetchedError
from foundation.errors import UserError
from foundation.files import Content, content_of, write_text
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.disk import Check, Disk
from pretrain.checkpoint.facts import AttemptHistory
from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.object_store import (
    MIRROR_INDEX,
    RUN_FILES,
    MirrorIndex,
    ObjectStore,
    StoredCheckpoint,
)
from pretrain.checkpoint.storage_retry import StorageRetry, WriteFailures
from pretrain.checkpoint.transfer import RankReports, Report, Transfer
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.distributed.collectives import on_any_rank
from pretrain.distributed.messages import Worker
from pretrain.distributed.world import World
from pretrain.errors import CheckpointError

logger = logging.getLogger(__name__)

FINISH_SECONDS = 60.0  # how long a run that ends or stops waits for its last upload
FINISH_POLL_SECONDS = 0.1


class Publication:
    """Rank 0's part: upload run files, index, marker and mirror.json, then delete old checkpoints.

    After the first upload it keeps mirror.json in memory, since no other attempt of the run writes
    it. The run resumed from `resumed_step`. Given a `history`, a store is refused if it has later
    steps that are not undone; without a history, the run gives up all later steps in the store.
    """

    def __init__(
        self,
        store: ObjectStore,
        disk: Disk,
        resumed_step: int,
        kept: CheckpointConfig,
        history: AttemptHistory | None = None,
    ) -> None:
        self._store, self._disk, self._resumed_step, self._kept = store, disk, resumed_step, kept
        self._history = history
        self._index: MirrorIndex | None = None
        self._is_deletion_logged = False

    def read(self) -> MirrorIndex | None:
        """Return the present mirror.json or None; CheckpointError if another run has written it."""
        try:
            index = self._store.index()
        except NotFetchedError as error:
            if not error.is_absent:
                raise
            return None
        if index.run != self._disk.run_id:
            raise CheckpointError(
                f"{self._store.url} holds run {index.run}, expected run {self._disk.run_id}; "
                "choose another checkpoint.mirror, or remove what is there"
            )
        return index

    def publish(self, directory: Path, check: Check) -> None:
        """Make the checkpoint valid in the store, once all ranks have uploaded their files."""
        index = self.read()
        if (stored := self._index) is None:
            # If mirror.json was lost, list the folders that are complete, so that none is deleted.
            index = index or self._store.rebuilt_index(self._disk.run_id)
            if self._history is not None:
                self._refuse_newer(index, self._history)
            stored = index.until(self._resumed_step)
        new = StoredCheckpoint.of(directory)
        if not stored.has(new):
            run_files = {}
            for name in RUN_FILES:
                copy = self._store.scratch / name
                copy.write_bytes(b"")
                # The file may grow while it is copied. Readers skip a last line that is cut.
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(self._disk.root.parent / name, copy)
                run_files[name] = self._put(f"{new.folder}/{name}", copy, check)
            for name in (files.INDEX, files.MARKER):  # the marker last
                self._put(f"{new.folder}/{name}", directory / name, check)
            new = StoredCheckpoint(new.step, new.index, run_files)
            stored = stored.adding(new, self._disk.steps(), self._kept)
            write_text(self._store.scratch / MIRROR_INDEX, stored.to_bytes().decode())
            self._disk.may_write()
            self._put(MIRROR_INDEX, self._store.scratch / MIRROR_INDEX, check)
        self._index = stored
        self._delete(stored, check)

    def _refuse_newer(self, index: MirrorIndex, history: AttemptHistory) -> None:
        """Raise CheckpointError if the store has a later step that is not undone.

        The start would have resumed from that step if it had seen it. So the store did not respond
        then, or another start of the run writes to it.
        """
        for step in (checkpoint.step for checkpoint in index.checkpoints):
            if step > self._resumed_step:
                attempt = self._store.read_index(index, step).attempt
                if history.stands(step, attempt):
                    raise CheckpointError(
                        f"{self._store.url} has step {step} of this run, which resumed from "
                        f"step {self._resumed_step}; nothing is removed there: stop it and start "
                        f"it again, with --from-step {self._resumed_step} to give that step up"
                    )

    def _put(self, name: str, path: Path, check: Check) -> Content:
        content = content_of(path)
        self._store.put(name, path, content, check)
        return content

    def _delete(self, stored: MirrorIndex, check: Check) -> None:
        """Remove checkpoints that are not kept; warn once if the store does not allow it."""
        try:
            if not self._store.writable.can_delete:
                raise CheckpointError(
                    f"{self._store.url}: nothing can be deleted in this kind of store"
                )

            def may_delete() -> None:
                check()
                # A newer attempt may be uploading files that no mirror.json lists yet.
                self._disk.may_write()

            self._store.remove_unnamed(stored, may_delete)
        except UserError as error:
            if not self._is_deletion_logged:
                logger.warning("%s; old checkpoints stay there", error)
            self._is_deletion_logged = True


def mirror_url(run: RunConfig) -> str:
    """Return the URL of the run's mirror; '' if it has none."""
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
        self._publication.read()  # raises before anything is put into another run's folder
        contents = sorted(read_index(self._directory).files.items())
        folder = StoredCheckpoint.of(self._directory).folder
        for name, content in contents[self._reports.rank :: self._reports.num_ranks]:
            self._store.put(f"{folder}/{name}", self._directory / name, content, self.check)
        return {}, {}

    def _publish(self, reports: list[Report]) -> None:
        self._publication.publish(self._directory, self.check)


class Mirror:
    """Uploads checkpoints of one start of a run. All ranks call `agree` and `finish` together.

    `disk` has the shared checkpoints up to `saved_step`; `resumed_step` is later if the run resumed
    from a local checkpoint. The store has `uploaded_step` (0: nothing). `history` is as in
    `Publication`. Rank 0 passes to `note` how many seconds the upload of a step took, or why the
    step is not in the store. Leaving the context cancels an upload in progress; the next start
    continues it. Errors of a store are logged, never raised.
    """

    def __init__(
        self,
        config: RunConfig,
        disk: Disk,
        world: World,
        resumed_step: int,
        uploaded_step: int,
        note: Callable[[int, float | str], None],
        history: AttemptHistory | None = None,
        saved_step: int | None = None,
    ) -> None:
        self.url, self._settings = mirror_url(config), config.checkpoint
        self._disk, self._world, self._note_step = disk, world, note
        self._stored_step = uploaded_step
        self._last_step = resumed_step if saved_step is None else saved_step
        # On rank 0 the upload in progress; on the others the last one, which may have ended.
        self._upload: Upload | None = None
        self._uploads_started = 0
        self._failure = ""  # why the last upload failed
        if self.url:
            self._scratch = tempfile.TemporaryDirectory(
                prefix="xl-pretrain-mirror-", ignore_cleanup_errors=True
            )
            self._store = ObjectStore(self.url, Path(self._scratch.name))
            kept = self._settings
            self._publication = Publication(self._store, disk, resumed_step, kept, history)
            self._failures, self._worker = WriteFailures(StorageRetry(math.inf)), Worker("mirror")

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.url:
            if self._upload is not None:
                # Not `cancel`, which waits: a store that does not respond would delay the run.
                self._upload.stop()
            self._worker.end()
            self._scratch.cleanup()

    def held(self) -> Collection[int]:
        """The step being uploaded, whose files must not be pruned. For rank 0 alone."""
        return () if self._upload is None else (self._upload.step,)

    def is_due(self, published_step: int) -> bool:
        """Return whether rank 0 wants the checkpoint of this step (0: none) uploaded now."""
        if not self._lacks(published_step) or self._upload is not None:
            return False
        return not self._failure or self._failures.is_due

    def _lacks(self, step: int) -> bool:
        """Return whether the store lacks this step, as far as rank 0 knows."""
        return bool(self.url) and self._world.is_main and step not in (0, self._stored_step)

    def agree(self, is_due: bool, last_step: int) -> None:
        """Note that `last_step` is the last save; if rank 0 decided so (`is_due`), upload it."""
        if not self.url:
            return
        self._last_step = last_step
        if self._world.is_main:
            self._note()
        if not is_due:
            return
        if self._upload is not None:
            # Rank 0 starts an upload only after its own part of the last one has ended. This rank's
            # part may still run, if another rank's failure ended the upload.
            self._upload.stop()
        self._uploads_started += 1
        name = f"{self._disk.attempt}/upload/{self._uploads_started}"
        self._upload = Upload(
            files.step_directory(self._disk.root, last_step),
            RankReports(name, self._world.rank, self._world.world_size),
            self._store,
            self._publication,
        )
        # One worker runs one upload after the other: two at once would write the same files.
        self._worker.add(self._upload.run)

    def _note(self) -> None:
        """Note the result of an upload that has ended; of failures in a row, only the first."""
        if self._upload is None or not self._upload.is_ended:
            return
        upload, self._upload = self._upload, None
        if upload.is_published:
            self._note_step(upload.step, round(time.monotonic() - upload.started, 1))
            self._stored_step, self._failure = upload.step, ""
            self._failures.ended()
        elif upload.problem is not None:
            self._failures.failed(upload.problem.text, "training continues")
            if not self._failure:
                self._note_step(upload.step, upload.problem.text)
            self._failure = upload.problem.text

    def finish(
        self,
        while_waiting: Callable[[], None] = lambda: None,
        stop_requests: Callable[[], int] = lambda: 0,
    ) -> None:
        """Wait until the store has the last published checkpoint, for FINISH_SECONDS at most.

        A collective. A new request to stop on any rank ends the wait.
        """
        if not self.url:
            return
        step = self._last_step
        deadline = time.monotonic() + FINISH_SECONDS
        before = stop_requests()
        is_over = False
        while True:
            own = [self._lacks(step), self.is_due(step), is_over]
            is_lacking, is_due, is_over = on_any_rank(own)
            self.agree(is_due, step)
            if not is_lacking:
                return
            if is_over:
                break
            while_waiting()
            time.sleep(FINISH_POLL_SECONDS)
            is_over = time.monotonic() > deadline or stop_requests() > before
        if self._world.is_main:
            failure = f" ({self._failure})" if self._failure else ""
            reason = f"not uploaded when the run ended{failure}"
            self._note_step(step, reason)
            logger.warning(
                "the checkpoint of step %d is not in %s: %s; it is on disk", step, self.url, reason
            )
