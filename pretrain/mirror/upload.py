"""Uploading a published checkpoint: each rank its share of the files, rank 0 what makes them count.

Every function may be interrupted at any point and called again: what the store has already is only
compared. `check` raises once the upload is canceled.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.corpora.writable_store import Content, WritableStore, content_of
from data_pipeline.errors import CheckpointError, UserError, os_error_text
from data_pipeline.files import write_text
from data_pipeline.patience import FIRST_PAUSE, LONGEST_PAUSE
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.index_file import parse_index
from pretrain.config.run import CheckpointConfig
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
