"""A run's mirror: which checkpoint is being uploaded, and how far. All ranks are in one state.

    IDLE --ready--> FILES --no rank busy--> INDEX --rank 0 not busy--> IDLE

Each rank uploads its share of a checkpoint in a thread; then rank 0 uploads what makes it count.
The ranks agree by three flags in the exchange of stop requests of each step, so no step waits for a
store, and nothing is written for each other to find. A store that fails keeps the state: its thread
tries again, until there is a newer checkpoint to upload instead.

Uploading a published checkpoint: each rank its share of the files, rank 0 what makes them count.

Every function may be interrupted at any point and called again: what the store has already is only
compared. `check` raises once the upload is canceled.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data_pipeline.corpora.writable_store import Content, WritableStore, content_of
from foundation.errors import CheckpointError, UserError, os_error_text
from foundation.files import write_text
from foundation.retry import FIRST_PAUSE, LONGEST_PAUSE
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.marker import parse_index
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.distributed.world import World, broadcast_value, on_any_rank
from pretrain.mirror.layout import (
    LARGEST_ROOT_BYTES,
    ROOT,
    RUN_FILES,
    ListedContent,
    MirrorIndex,
    StoredCheckpoint,
    parse,
    share_of_rank,
    to_delete,
    until,
    with_checkpoint,
)
from pretrain.rundir.events import Event, Mirrored, MirrorFailed, Restored
from pretrain.rundir.ledger import Ledger, last_of
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)
Check = Callable[[], None]


class Canceled(Exception):
    """The upload is not wanted any more."""


class Retried(threading.Thread):
    """Calls `task` in the background until it succeeds or is canceled, with growing pauses.

    It waits for the `former` one first: two would write the same files.
    """

    def __init__(self, task: Callable[[Check], None], former: Retried | None) -> None:
        super().__init__(name="mirror", daemon=True)
        self._task, self._former = task, former
        self._canceled = threading.Event()
        self._told = former is not None and bool(former.problem)  # a failure that lasts is logged
        self.problem = ""  # of the last try

    def cancel(self) -> None:
        """Upload nothing more. It does not wait: a store that is silent would delay the run."""
        self._canceled.set()

    def run(self) -> None:
        if self._former is not None:
            self._former.join()
            self._former = None
        pause = FIRST_PAUSE
        while not self._canceled.is_set():
            try:
                self._task(self._check)
                self.problem = ""
                if self._told:
                    logger.warning("uploads to the mirror work again")
                return
            except Canceled:
                return
            except OSError as error:
                self.problem = os_error_text(error)
            except Exception as error:  # whatever it is, the run goes on
                self.problem = str(error) if isinstance(error, UserError) else repr(error)
            if self._canceled.is_set():  # the files may be gone that it still had open
                return
            if not self._told:
                logger.warning("%s; training continues, the upload is tried again", self.problem)
                self._told = True
            self._canceled.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _check(self) -> None:
        if self._canceled.is_set():
            raise Canceled


def stored_form(directory: Path) -> StoredCheckpoint:
    """Return the checkpoint in the directory as a mirror names it, without the run's files."""
    index = content_of(directory / files.INDEX)
    loss = files.validation_loss(directory)
    return StoredCheckpoint(
        int(directory.name.removeprefix("step-")), index, {}, loss if loss == loss else None
    )


def upload_share(
    store: WritableStore, directory: Path, rank: int, world_size: int, check: Check
) -> None:
    """Upload this rank's share of the files that the checkpoint's index lists."""
    path = directory / files.INDEX
    listed = parse_index(path, path.read_bytes())["files"]
    folder = stored_form(directory).folder
    for name in share_of_rank(listed, rank, world_size):
        check()
        store.put(f"{folder}/{name}", directory / name, _content(directory / name, listed[name]))


def _content(path: Path, parts: list[dict[str, Any]]) -> Content:
    """Return what the file contains, which is what the index lists; CheckpointError if not."""
    expected = ListedContent.of(parts)
    if len(expected.parts) == 1:
        return expected.parts[0]  # the store is compared with it
    if problem := expected.mismatch(path):
        raise CheckpointError(f"{path}: {problem}")
    return content_of(path)


class Publication:
    """Rank 0's part: run files, index and marker of a checkpoint, mirror.json, then deletions.

    It remembers mirror.json, which no other attempt of the run writes: `may_write` raises UserError
    if a newer one has claimed the run.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        resumed_step: int,
        kept: CheckpointConfig,
        may_write: Check,
    ) -> None:
        self._run_dir, self._run_id, self._kept = run_dir, run_id, kept
        self._resumed_step, self._may_write = resumed_step, may_write
        self._index: MirrorIndex | None = None
        self._told_of_deletion = False

    def publish(self, store: WritableStore, directory: Path, scratch: Path, check: Check) -> None:
        """Make the checkpoint count, once all ranks have uploaded their files."""
        found = self.read(store)
        stored = self._index or until(found, self._resumed_step)
        new = stored_form(directory)
        if stored.find(new.step, new.index) is None:
            run_files = {}
            for name in RUN_FILES:
                check()
                copy = scratch / name
                _copy_whole_lines(self._run_dir / name, copy)
                run_files[name] = content_of(copy)
                store.put(f"{new.folder}/{name}", copy, run_files[name])
            for name in (files.INDEX, files.MARKER):  # the marker last
                check()
                store.put(f"{new.folder}/{name}", directory / name, content_of(directory / name))
            new = StoredCheckpoint(new.step, new.index, run_files, new.validation_loss)
            on_disk = files.steps_on_disk(directory.parent)
            stored = with_checkpoint(stored, new, on_disk, self._kept)
            content = stored.to_bytes()
            write_text(scratch / ROOT, content.decode())
            check()
            self._may_write()
            store.put(ROOT, scratch / ROOT, content_of(scratch / ROOT))
        self._index = stored
        self._delete(store, stored, check)

    def read(self, store: WritableStore) -> MirrorIndex:
        """Return mirror.json as it is now; CheckpointError if another run has written it."""
        content = store.read(ROOT, LARGEST_ROOT_BYTES)
        found = (
            MirrorIndex(self._run_id) if content is None else parse(f"{store.url}/{ROOT}", content)
        )
        if found.run != self._run_id:
            raise CheckpointError(
                f"{store.url} holds run {found.run}, expected run {self._run_id}; choose another "
                "checkpoint.mirror, or remove what is there"
            )
        return found

    def _delete(self, store: WritableStore, stored: MirrorIndex, check: Check) -> None:
        """Remove what is not kept; a store that does not allow it costs space, not the run."""
        try:
            if not store.can_delete:
                raise CheckpointError(f"{store.url}: nothing can be deleted in this kind of store")
            for names in to_delete(store.names(), stored):
                check()
                self._may_write()  # a newer attempt may be uploading what is not listed yet
                store.delete(names)
        except UserError as error:
            if not self._told_of_deletion:
                logger.warning("%s; old checkpoints stay there", error)
            self._told_of_deletion = True


def _copy_whole_lines(source: Path, copy: Path) -> None:
    """Copy a file that may be growing, without a line that is half written; empty if missing."""
    copy.unlink(missing_ok=True)
    if not source.exists():
        return copy.touch()
    shutil.copyfile(source, copy)
    with open(copy, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 20)))
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
    return None


MIB = 1 << 20
POLL_SECONDS = 0.1


class Phase(Enum):
    IDLE = auto()
    FILES = auto()  # each rank uploads its share
    INDEX = auto()  # rank 0 uploads the rest


def location(run: RunConfig) -> str:
    """The URL of the run's mirror; '' if it has none."""
    base = run.checkpoint.mirror.rstrip("/")
    return f"{base}/{run.name}" if base else ""


def step_in_store(ledger: Sequence[Event], url: str, step: int) -> int:
    """`step` if the store at `url` has its checkpoint as the run resumes from it, else 0."""
    last = last_of(ledger, Mirrored, Restored)
    return step if last is not None and (last.step, last.url) == (step, url) else 0


class Mirror:
    """Uploads checkpoints of one start of a run. All ranks call `agree` and `finish` together.

    A context manager: leaving it cancels an upload in progress, which the next start continues.
    Nothing here raises what a store does.
    """

    def __init__(
        self,
        run: RunConfig,
        run_dir: RunDir,
        world: World,
        resumed_step: int,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = location(run)
        self._settings, self._world = run.checkpoint, world
        self._root, self._ledger = run_dir.checkpoints, Ledger(run_dir.ledger.path)
        self._phase, self._step, self._began = Phase.IDLE, 0, 0.0
        self._last_step = resumed_step
        self._task: Retried | None = None
        self._store: WritableStore | None = None
        self._is_recorded = False  # the failure that lasts
        self._scratch: TemporaryDirectory[str] | None = None
        if self.url:
            known = (
                step_in_store(self._ledger.read(), self.url, resumed_step) if world.is_main else 0
            )
            self._step = broadcast_value(known, int)
            self._publication = Publication(
                run_dir.path, run_dir.identity.id, resumed_step, run.checkpoint, may_write
            )

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._scratch is not None:
            self._scratch.cleanup()

    def held(self) -> Collection[int]:
        """The step whose files on disk are needed."""
        return () if self._phase is Phase.IDLE else (self._step,)

    def flags(self, published_step: int) -> tuple[bool, bool, bool]:
        """Whether this rank is busy; its store fails; the checkpoint of this step is to be
        uploaded.

        `published_step` is 0 where the rank does not know of a published one.
        """
        if not self.url:
            return False, False, False
        task = self._task
        is_busy = task is not None and task.is_alive()
        return (
            is_busy,
            is_busy and bool(task and task.problem),
            published_step not in (0, self._step),
        )

    def agree(self, flags: Sequence[bool], last_step: int) -> None:
        """Do what follows from the flags that any rank has; `last_step` is that of the last save.

        Only rank 0 knows early that the last save is published, and only then is the flag set.
        """
        if not self.url:
            return
        any_busy, any_failing, any_ready = flags
        self._last_step = last_step
        if self._world.is_main and any_failing and not self._is_recorded:
            problem = (self._task.problem if self._task else "") or "see the logs of other ranks"
            self._ledger.append_soon(MirrorFailed(step=self._step, url=self.url, problem=problem))
            self._is_recorded = True
        if any_ready and (self._phase is Phase.IDLE or any_failing):
            self._begin(last_step)
        elif any_busy:
            pass
        elif self._phase is Phase.FILES:
            self._phase = Phase.INDEX
            if self._world.is_main:
                self._run(lambda store, scratch, check: self._publish(store, scratch, check))
        elif self._phase is Phase.INDEX:
            self._phase = Phase.IDLE
            if self._world.is_main:
                seconds = time.monotonic() - self._began
                self._ledger.append_soon(
                    Mirrored(step=self._step, url=self.url, seconds=round(seconds, 1))
                )
                self._is_recorded = False

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
        deadline = time.monotonic() + self._settings.mirror_wait_seconds
        before, is_over = stop_requests(), False
        while True:
            *flags, is_over = on_any_rank([*self.flags(step), is_over])
            self.agree(flags, step)
            if self._phase is Phase.IDLE and not flags[2]:
                return
            if is_over:
                break
            while_waiting()
            time.sleep(POLL_SECONDS)
            is_over = time.monotonic() > deadline or stop_requests() > before
        if self._world.is_main:
            problem = self._task.problem if self._task is not None else ""
            reason = f"not uploaded when the run ended{f' ({problem})' if problem else ''}"
            failed = MirrorFailed(step=step, url=self.url, problem=reason)
            self._ledger.append_soon(failed)
            logger.warning("%s; it is on disk", failed.description)

    def _begin(self, step: int) -> None:
        if self._task is not None:
            self._task.cancel()
        self._phase, self._step, self._began = Phase.FILES, step, time.monotonic()
        directory, world = files.step_directory(self._root, step), self._world
        self._run(
            lambda store, scratch, check: upload_share(
                store, directory, world.rank, world.world_size, check
            )
        )

    def _publish(self, store: WritableStore, scratch: Path, check: Check) -> None:
        directory = files.step_directory(self._root, self._step)
        self._publication.publish(store, directory, scratch, check)

    def _run(self, task: Callable[[WritableStore, Path, Check], None]) -> None:
        def run(check: Check) -> None:
            if self._scratch is None:
                self._scratch = tempfile.TemporaryDirectory(
                    prefix="xl-pretrain-mirror-", ignore_cleanup_errors=True
                )
            scratch = Path(self._scratch.name)
            if self._store is None:  # here, because importing an SDK takes seconds
                rate = self._settings.mirror_mib_per_second * MIB / self._world.world_size
                store = WritableStore(self.url, scratch, bytes_per_second=rate)
                self._publication.read(store)  # the folder of another run gets no files
                self._store = store
            task(self._store, scratch, check)

        self._task = Retried(run, former=self._task)
        self._task.start()
