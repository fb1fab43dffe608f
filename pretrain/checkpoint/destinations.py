"""Where checkpoints are kept: a run directory, a node's disk, an object store. Torch-free.

A step is at a destination if its marker is. The marker is written last, once every file that the
index lists has been confirmed there by name and size. So whoever looks finds whole steps.

    run directory   RUN/checkpoints/step-00000100/                  all ranks' files (`Disk`)
    node's disk     LOCAL/run-3f0c.../rank-00003/step-00000150/     a rank's own (`Disk`)
    object store    checkpoint.mirror/NAME/                         a copy of the run directory's:

    URL/mirror.json                       which checkpoints there are; replaced as a whole, last
        step-00000100-5b1c.../            named by step and hash of its index: never changed
            rank-00000.safetensors ...    the checkpoint's files, then index.json, then COMPLETE
            run.json config.yaml ledger.jsonl metrics.jsonl    the run as it was then

A folder that mirror.json does not name does not exist for a reader, whatever is in it. What is kept
and deleted there are pure functions of names, steps and hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from data_pipeline.corpora.fetch import (
    NotFetchedError,
    WritableStore,
    fetch_file,
    in_parallel,
    size_problem,
)
from data_pipeline.corpora.stores import RetryPolicy, store_at
from foundation.errors import CheckpointError, UserError
from foundation.files import (
    Content,
    content_of,
    move,
    named_errors,
    own_file,
    parse_json,
    path_below,
    read_regular,
    sync_file,
    write_text,
)
from foundation.records import Fields, InvalidField, json_text
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.facts import Destination, History
from pretrain.config.run import CheckpointConfig

logger = logging.getLogger(__name__)

Check = Callable[[], None]  # raises once what it is given to is not wanted any more


# ----------------------------------------------------------------------------------------- a disk

BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class TensorFile:
    """A file to be written: its header, then the bytes of its tensors, in host memory."""

    header: bytes
    body: memoryview | bytes


def write_file(path: Path, content: TensorFile, check: Check) -> dict[str, Any]:
    """Write and fsync the file; returns its size and SHA-256."""
    digest, num_bytes = hashlib.sha256(), 0
    with named_errors(path), open(path, "wb", opener=own_file) as file:
        for source in (memoryview(content.header), memoryview(content.body)):
            for start in range(0, len(source), BLOCK_BYTES):
                check()
                block = source[start : start + BLOCK_BYTES]
                digest.update(block)
                num_bytes += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


@dataclass(frozen=True)
class Disk:
    """The checkpoints of a run below `root`; what `attempt` puts there is hidden until published.

    `may_write` is called before a checkpoint gets its name; it raises UserError if a newer attempt
    has claimed the run. The file that a start from it `relies_on`, metrics.jsonl, is synced before.
    `tell` is called once it has its name: a publication is a fact.
    """

    root: Path
    attempt: str = ""
    run_id: str = ""
    may_write: Check = lambda: None
    relies_on: Path | None = None
    tell: Callable[[int, Destination], None] = lambda step, destination: None
    destination: Destination = Destination.RUN_DIRECTORY

    def partial(self, step: int) -> Path:
        return files.partial_directory(self.root, step, self.attempt)

    def prepare(self, step: int, num_bytes: int) -> None:
        """Make the directory that ranks write into; CheckpointError without space for it.

        A rank that made one itself would write where no other rank looks, under a lost mount.
        """
        files.require_space(self.root, num_bytes)
        self.partial(step).mkdir(exist_ok=True)

    def put(self, step: int, name: str, source: TensorFile, check: Check) -> dict[str, Any]:
        return write_file(self.partial(step) / name, source, check)

    def publish(self, index: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> None:
        """Write index and marker once all files are seen, and give the step its name."""
        step = index["step"]
        final = files.step_directory(self.root, step)
        if self.relies_on is not None:
            sync_file(self.relies_on)
        marker.publish(self.partial(step), final, dict(index), reports, self.may_write)
        self.tell(step, self.destination)

    def discard(self, step: int) -> None:
        """Remove what this attempt has put there and not published."""
        files.discard_partial(self.partial(step))

    def steps(self) -> list[int]:
        return files.steps_on_disk(self.root)

    def get(self, step: int) -> marker.Checkpoint:
        return marker.verify(files.step_directory(self.root, step), self.run_id)

    def remove_undone(self, published: int) -> None:
        """Remove what is newer than a step that this attempt has published, and not its own.

        Not before: until then it is the newest that the run has.
        """
        for step in self.steps():
            directory = files.step_directory(self.root, step)
            if step > published and not self._is_own(directory):
                files.remove(directory)

    def _is_own(self, directory: Path) -> bool:
        with contextlib.suppress(CheckpointError):
            return marker.read_index(directory).attempt == self.attempt
        return False


# -------------------------------------------------------------------------------- an object store

FORMAT = 1
ROOT = "mirror.json"
SCRATCH = ".restore.tmp"  # in the run directory: renames need the same file system
LARGEST_ROOT_BYTES = 1 << 24
LARGEST_INDEX_BYTES = 1 << 28
MOST_STEPS = 99_999_999  # a step has eight digits in names
# What goes along with a checkpoint, and how many bytes of it are read back.
RUN_FILES = {
    "run.json": 1 << 20,
    "config.yaml": 1 << 20,
    "ledger.jsonl": 1 << 36,
    "metrics.jsonl": 1 << 36,
}
_IN_A_STEP = re.compile(r"(step-(\d{8})-[0-9a-f]{16})/[^/]+")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint in the store: its index, and the run's files that were uploaded with it."""

    step: int
    index: Content
    run_files: dict[str, Content] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path) -> StoredCheckpoint:
        """The one in a directory, as a store names it, without the run's files."""
        step = int(directory.name.removeprefix("step-"))
        return cls(step, content_of(directory / files.INDEX))

    @property
    def folder(self) -> str:
        """Where its files are, below the URL."""
        return f"step-{self.step:08d}-{self.index.sha256[:16]}"


@dataclass(frozen=True)
class MirrorIndex:
    """The contents of mirror.json: a run's id, and its checkpoints, oldest first."""

    run: str
    checkpoints: tuple[StoredCheckpoint, ...] = ()

    @classmethod
    def parse(cls, where: str, content: bytes) -> MirrorIndex:
        """Return the contents of mirror.json; CheckpointError unless all its fields are right."""
        try:
            fields = Fields(parse_json(content)).only(("format", "run", "checkpoints"))
            if (found := fields.integer("format")) != FORMAT:
                raise CheckpointError(
                    f"{where}: found format {found}, expected format {FORMAT}; "
                    "restore with the version that wrote it"
                )
            checkpoints = tuple(map(_parsed_checkpoint, fields.items("checkpoints")))
            steps = [each.step for each in checkpoints]
            if steps != sorted(set(steps)):
                raise InvalidField(f"its steps are not in order: {steps[:5]}")
            return cls(fields.text("run"), checkpoints)
        except (ValueError, InvalidField) as error:
            raise CheckpointError(f"{where}: found no index of a mirror ({error})") from None

    def to_bytes(self) -> bytes:
        """As `parse` reads it back; equal indexes give equal bytes."""
        checkpoints = [
            {
                "step": each.step,
                "files": {
                    name: vars(content)
                    for name, content in {files.INDEX: each.index, **each.run_files}.items()
                },
            }
            for each in self.checkpoints
        ]
        tree = {"format": FORMAT, "run": self.run, "checkpoints": checkpoints}
        return (json_text(tree, indent=1, sort_keys=True) + "\n").encode()

    def of(self, step: int) -> StoredCheckpoint:
        """The checkpoint of a step that it lists."""
        return next(each for each in self.checkpoints if each.step == step)

    def has(self, new: StoredCheckpoint) -> bool:
        """Whether it lists the checkpoint, and not an earlier try of its step."""
        return new.folder in [each.folder for each in self.checkpoints]

    def until(self, step: int) -> MirrorIndex:
        """Return the index without checkpoints after the one that a start resumes from.

        They belong to steps that are made again: a rewind, or an older disk, left them.
        """
        return MirrorIndex(self.run, tuple(each for each in self.checkpoints if each.step <= step))

    def adding(
        self, new: StoredCheckpoint, on_disk: Collection[int], kept: CheckpointConfig
    ) -> MirrorIndex:
        """Return the index with the new checkpoint, and without what the run does not keep.

        What is still on disk is kept, too.
        """
        by_step = {each.step: each for each in self.checkpoints} | {new.step: new}
        steps = sorted(by_step)
        old = files.steps_to_prune(steps, steps, kept.keep_last, kept.keep_every, on_disk)
        left = [by_step[step] for step in steps if step not in old]
        return MirrorIndex(self.run, tuple(left))

    def unnamed(self, names: Sequence[str]) -> list[str]:
        """Return the objects in folders of steps that it does not name.

        Also what interrupted uploads left, but for later steps than the last one named: those may
        be being uploaded. Nothing else under the URL is ever deleted.
        """
        kept = {each.folder for each in self.checkpoints}
        last = max((each.step for each in self.checkpoints), default=-1)
        matches = filter(None, map(_IN_A_STEP.fullmatch, names))
        return [match[0] for match in matches if match[1] not in kept and int(match[2]) <= last]


def _parsed_checkpoint(fields: Fields) -> StoredCheckpoint:
    fields.only(("step", "files"))
    limits = {files.INDEX: LARGEST_INDEX_BYTES, **RUN_FILES}
    entries = fields.object("files").only(list(limits))
    contents = {}
    for name, most in limits.items():
        entry = entries.object(name).only(("bytes", "sha256"))
        contents[name] = Content(entry.integer("bytes", most=most), entry.sha256("sha256"))
    step = fields.integer("step", most=MOST_STEPS)
    return StoredCheckpoint(step, contents.pop(files.INDEX), contents)


class ObjectStore:
    """The checkpoints of a run under a URL.

    Every function may be interrupted at any point and called again: what the store has already is
    only compared. Files arrive in `scratch`, where a directory in use becomes a whole one.
    """

    def __init__(self, url: str, scratch: Path, retry_policy: RetryPolicy | None = None) -> None:
        self.url, self.scratch = url.rstrip("/"), scratch
        self._policy = retry_policy or RetryPolicy()

    def index(self) -> MirrorIndex:
        """Return mirror.json; NotFetchedError if there is none."""
        check, path = partial(size_problem, most=LARGEST_ROOT_BYTES), self.scratch / ROOT
        store = store_at(self.url, self._policy)
        fetch_file(store, ROOT, path, self.scratch, check, LARGEST_ROOT_BYTES)
        return MirrorIndex.parse(f"{self.url}/{ROOT}", read_regular(path, LARGEST_ROOT_BYTES))

    def get(self, index: MirrorIndex, step: int, with_run: bool = True) -> marker.Checkpoint:
        """Fetch a checkpoint, and the run's files with it, into `scratch`.

        What is there already from an interrupted call is not fetched again. DataError if the store
        does not answer.
        """
        found, checkpoint = index.of(step), self.read_index(index, step)
        files.require_space(self.scratch, checkpoint.num_bytes)
        if with_run:
            for name, content in found.run_files.items():
                self._fetch(found.folder, name, self.scratch, content)
        target = checkpoint.directory

        def fetch(name: str) -> None:
            self._fetch(found.folder, name, target, checkpoint.files[name])

        in_parallel(fetch, sorted(checkpoint.files), f"step {step}", logger.info)
        return marker.verify(target, index.run)

    def read_index(self, index: MirrorIndex, step: int) -> marker.Checkpoint:
        """Fetch what a checkpoint's own index says, without its files."""
        found, target = index.of(step), files.step_directory(self.scratch, step)
        target.mkdir(parents=True, exist_ok=True)
        self._fetch(found.folder, files.INDEX, target, found.index)
        write_text(target / files.MARKER, f"{found.index.sha256}\n")
        return marker.read_index(target, index.run)

    def bring(self, index: MirrorIndex, step: int, root: Path) -> None:
        """Fetch a checkpoint into the run directory's `root`, in place of a damaged one."""
        checkpoint, final = self.get(index, step, with_run=False), files.step_directory(root, step)
        if final.exists():
            files.remove(final)
        move(checkpoint.directory, final)
        logger.info("fetched step %d from %s", step, self.url)

    def _fetch(self, folder: str, name: str, directory: Path, content: Content) -> None:
        """Fetch a file of known content, unless it is there; CheckpointError if the store has
        another."""
        path = path_below(directory, name)
        if path.is_file() and content.mismatch(path) is None:
            return
        problem: str | None = None

        def check(arrived: Path) -> str | None:
            nonlocal problem
            problem = content.mismatch(arrived)
            return problem

        try:
            store = store_at(f"{self.url}/{folder}", self._policy)
            fetch_file(store, name, path, self.scratch, check, content.bytes)
        except NotFetchedError as error:
            if problem or error.is_absent:
                raise CheckpointError(str(error)) from None
            raise

    @cached_property
    def writable(self) -> WritableStore:
        """Opened when it is first needed: importing an SDK takes seconds."""
        return WritableStore(self.url, self.scratch, self._policy)

    def put(self, name: str, path: Path, content: Content, check: Check) -> None:
        """Upload a file unless the store has it; DataError unless the store returns `content`."""
        check()
        self.writable.put(name, path, content)

    def remove_unnamed(self, index: MirrorIndex, check: Check) -> None:
        """Remove what the index does not name, markers first."""
        names = index.unnamed(self.writable.names())
        markers = [name for name in names if name.endswith(f"/{files.MARKER}")]
        for group in (markers, [name for name in names if name not in markers]):
            if group:
                check()
                self.writable.delete(group)


class Publication:
    """Rank 0's part: run files, index and marker of a checkpoint, mirror.json, then deletions.

    It remembers mirror.json, which no other attempt of the run writes. The run resumed from
    `resumed_step`, and its checkpoints are on `disk`, in the run directory. Without a `history`
    later steps in the store are given up.
    """

    def __init__(
        self,
        store: ObjectStore,
        disk: Disk,
        resumed_step: int,
        kept: CheckpointConfig,
        history: History | None = None,
    ) -> None:
        self._store, self._disk, self._resumed_step, self._kept = store, disk, resumed_step, kept
        self._history = history
        self._index: MirrorIndex | None = None
        self._is_deletion_logged = False

    def read(self) -> MirrorIndex:
        """Return mirror.json as it is now; CheckpointError if another run has written it."""
        try:
            found = self._store.index()
        except NotFetchedError as error:
            if not error.is_absent:
                raise
            return MirrorIndex(self._disk.run_id)
        if found.run != self._disk.run_id:
            raise CheckpointError(
                f"{self._store.url} holds run {found.run}, expected run {self._disk.run_id}; "
                "choose another checkpoint.mirror, or remove what is there"
            )
        return found

    def publish(self, directory: Path, check: Check) -> None:
        """Make the checkpoint count, once all ranks have uploaded their files."""
        found = self.read()
        if (stored := self._index) is None:
            if self._history is not None:
                self._refuse_newer(found, self._history)
            stored = found.until(self._resumed_step)
        new = StoredCheckpoint.of(directory)
        if not stored.has(new):
            run_files = {}
            for name in RUN_FILES:
                copy = self._store.scratch / name
                copy.write_bytes(b"")
                # Of a file that grows the last line may be half there: readers skip it.
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(self._disk.root.parent / name, copy)
                run_files[name] = self._put(f"{new.folder}/{name}", copy, check)
            for name in (files.INDEX, files.MARKER):  # the marker last
                self._put(f"{new.folder}/{name}", directory / name, check)
            new = StoredCheckpoint(new.step, new.index, run_files)
            stored = stored.adding(new, self._disk.steps(), self._kept)
            write_text(self._store.scratch / ROOT, stored.to_bytes().decode())
            self._disk.may_write()
            self._put(ROOT, self._store.scratch / ROOT, check)
        self._index = stored
        self._delete(stored, check)

    def _refuse_newer(self, found: MirrorIndex, history: History) -> None:
        """Raise CheckpointError if the store has a later step that is not undone.

        The start would have taken it, had it known: the store was away, or another start uses it.
        """
        for each in found.checkpoints:
            if each.step > self._resumed_step:
                attempt = self._store.read_index(found, each.step).attempt
                if history.stands(each.step, attempt):
                    raise CheckpointError(
                        f"{self._store.url} has step {each.step} of this run, which resumed from "
                        f"step {self._resumed_step}; nothing is removed there: stop it and start "
                        f"it again, with --from-step {self._resumed_step} to give that step up"
                    )

    def _put(self, name: str, path: Path, check: Check) -> Content:
        content = content_of(path)
        self._store.put(name, path, content, check)
        return content

    def _delete(self, stored: MirrorIndex, check: Check) -> None:
        """Remove what is not kept; a store that does not allow it costs space, not the run."""
        try:
            if not self._store.writable.can_delete:
                raise CheckpointError(
                    f"{self._store.url}: nothing can be deleted in this kind of store"
                )

            def may_delete() -> None:
                check()
                self._disk.may_write()  # a newer attempt may be uploading what is not listed yet

            self._store.remove_unnamed(stored, may_delete)
        except UserError as error:
            if not self._is_deletion_logged:
                logger.warning("%s; old checkpoints stay there", error)
            self._is_deletion_logged = True
