"""The checkpoints of a run in an object store, a copy of those in its run directory. Torch-free.

    URL/mirror.json                       which checkpoints there are; replaced as a whole, last
        step-00000100-5b1c.../            named by step and hash of its index: never changed
            rank-00000.safetensors ...    the checkpoint's files, then index.json, then COMPLETE
            run.json config.yaml ledger.jsonl metrics.jsonl    the run as it was then

Readers ignore a folder that mirror.json does not name. Which checkpoints are kept and which files
are deleted are pure functions of names, steps and hashes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

from data_pipeline.corpora.fetch import NotFetchedError, fetch_file, in_parallel
from data_pipeline.corpora.stores import store_at
from data_pipeline.corpora.web_requests import RetryPolicy
from data_pipeline.corpora.writable_store import WritableStore, size_problem
from foundation.errors import shown
from foundation.files import Content, content_of, move, read_regular, write_text
from foundation.paths import path_below
from foundation.typed_values import Line, between, from_json, json_text, parse_json
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import retention
from pretrain.checkpoint.disk import Check
from pretrain.checkpoint.index import Checkpoint, read_index
from pretrain.checkpoint.verify import verify
from pretrain.config.run import CheckpointConfig
from pretrain.errors import CheckpointError

logger = logging.getLogger(__name__)

MIRROR_FORMAT = 1
MIRROR_INDEX = "mirror.json"
SCRATCH = ".restore.tmp"  # in the run directory: renames need the same file system
LARGEST_ROOT_BYTES = 1 << 24  # of mirror.json
LARGEST_INDEX_BYTES = 1 << 28  # of a checkpoint's index.json
MOST_STEPS = 99_999_999  # a step has eight digits in names
# The run's files that are uploaded with a checkpoint: name -> most bytes that a restore accepts.
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
        """Return the entry for the checkpoint in a directory, without the run's files."""
        step = int(directory.name.removeprefix("step-"))
        return cls(step, content_of(directory / files.INDEX))

    @property
    def folder(self) -> str:
        """The name of its folder below the URL."""
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
            version = parse_json(content).get("format")
            if type(version) is int and version != MIRROR_FORMAT:
                raise CheckpointError(
                    f"{where}: found format {version}, expected format {MIRROR_FORMAT}; "
                    "restore with the version that wrote it"
                )
            stored = from_json(_Root, content)
            steps = [checkpoint.step for checkpoint in stored.checkpoints]
            if steps != sorted(set(steps)):
                raise ValueError(f"its steps are not in order: {steps[:5]}")
            return cls(stored.run, tuple(map(_stored_checkpoint, stored.checkpoints)))
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: found no index of a mirror ({error})") from None

    def to_bytes(self) -> bytes:
        """Return what `parse` reads back; equal indexes give equal bytes."""
        checkpoints = [
            {
                "step": stored.step,
                "files": {
                    name: vars(content)
                    for name, content in {files.INDEX: stored.index, **stored.run_files}.items()
                },
            }
            for stored in self.checkpoints
        ]
        tree = {"format": MIRROR_FORMAT, "run": self.run, "checkpoints": checkpoints}
        return (json_text(tree, indent=1, sort_keys=True) + "\n").encode()

    def of(self, step: int) -> StoredCheckpoint:
        """Return the checkpoint of a step, which the index must list."""
        return next(stored for stored in self.checkpoints if stored.step == step)

    def has(self, new: StoredCheckpoint) -> bool:
        """Return whether it lists this very checkpoint, not an earlier one of the same step."""
        return new.folder in [stored.folder for stored in self.checkpoints]

    def until(self, step: int) -> MirrorIndex:
        """Return the index without checkpoints after `step`: the run makes these steps again."""
        return MirrorIndex(
            self.run, tuple(stored for stored in self.checkpoints if stored.step <= step)
        )

    def adding(
        self, new: StoredCheckpoint, on_disk: Collection[int], kept: CheckpointConfig
    ) -> MirrorIndex:
        """Return the index with the new checkpoint and those that the run keeps or has on disk."""
        by_step = {stored.step: stored for stored in self.checkpoints} | {new.step: new}
        steps = sorted(by_step)
        old = retention.steps_to_prune(steps, steps, kept.keep_last, kept.keep_every, on_disk)
        return MirrorIndex(self.run, tuple(by_step[step] for step in steps if step not in old))

    def unnamed(self, names: Sequence[str]) -> list[str]:
        """Return the objects that may be deleted: all in step folders that the index does not name.

        Interrupted uploads leave such folders. Not returned are folders of later steps than any in
        the index, which may be uploads in progress, and anything else under the URL.
        """
        kept = {stored.folder for stored in self.checkpoints}
        last = max((stored.step for stored in self.checkpoints), default=-1)
        matches = filter(None, map(_IN_A_STEP.fullmatch, names))
        return [match[0] for match in matches if match[1] not in kept and int(match[2]) <= last]


@dataclass(frozen=True)
class _Entry:
    step: Annotated[int, between(0, MOST_STEPS)]
    files: dict[str, Content]


@dataclass(frozen=True)
class _Root:
    format: int
    run: Line
    checkpoints: tuple[_Entry, ...]


def _stored_checkpoint(entry: _Entry) -> StoredCheckpoint:
    limits = {files.INDEX: LARGEST_INDEX_BYTES, **RUN_FILES}
    if differing := sorted(entry.files.keys() ^ limits.keys()):
        raise ValueError(f"step {entry.step}: {shown(differing[0])} is missing or unexpected")
    for name, content in entry.files.items():
        if content.bytes > limits[name]:
            raise ValueError(f"{name} has {content.bytes:,} bytes, expected <= {limits[name]:,}")
    return StoredCheckpoint(entry.step, entry.files.pop(files.INDEX), entry.files)


class ObjectStore:
    """The checkpoints of a run under a URL.

    Every function may be interrupted at any point and called again: a file that is already there is
    compared instead of transferred. Downloads are put together in `scratch` and then renamed.
    """

    def __init__(self, url: str, scratch: Path, retry_policy: RetryPolicy | None = None) -> None:
        self.url, self.scratch = url.rstrip("/"), scratch
        self._policy = retry_policy or RetryPolicy()

    def index(self) -> MirrorIndex:
        """Return mirror.json; NotFetchedError without one."""
        path = self._arrived(self.url, MIRROR_INDEX, LARGEST_ROOT_BYTES)
        return MirrorIndex.parse(
            f"{self.url}/{MIRROR_INDEX}", read_regular(path, LARGEST_ROOT_BYTES)
        )

    def rebuilt_index(self, run: str) -> MirrorIndex:
        """Return an index of all complete folders, to replace a lost mirror.json.

        It is empty for a store that allows no deletion. Raises DataError if the store does not
        respond.
        """
        checkpoints: dict[int, StoredCheckpoint] = {}
        names = sorted(self.writable.names()) if self.writable.can_delete else []
        for match in filter(None, map(_IN_A_STEP.fullmatch, names)):
            folder, step = match[1], int(match[2])
            if match[0] == f"{folder}/{files.MARKER}" and (stored := self._stored(folder, step)):
                checkpoints[step] = stored
        return MirrorIndex(run, tuple(checkpoints[step] for step in sorted(checkpoints)))

    def _stored(self, folder: str, step: int) -> StoredCheckpoint | None:
        """Return the entry for a folder; None if a file is missing or the index is another's."""
        limits = {files.INDEX: LARGEST_INDEX_BYTES, **RUN_FILES}
        try:
            url = f"{self.url}/{folder}"
            contents = {
                name: content_of(self._arrived(url, name, most)) for name, most in limits.items()
            }
        except NotFetchedError as error:
            if not error.is_absent:
                raise
            return None
        stored = StoredCheckpoint(step, contents.pop(files.INDEX), contents)
        return stored if stored.folder == folder else None

    def _arrived(self, url: str, name: str, most: int) -> Path:
        """Fetch a file of unknown hash and at most `most` bytes; return its path."""
        path, store = self.scratch / name, store_at(url, self._policy)
        fetch_file(store, name, path, self.scratch, partial(size_problem, most=most), most)
        return path

    def get(self, index: MirrorIndex, step: int, with_run: bool = True) -> Checkpoint:
        """Fetch a checkpoint into `scratch`, and `with_run` the run's files, too.

        Files from an interrupted call are not fetched again. Raises DataError if the store does not
        respond.
        """
        stored, checkpoint = index.of(step), self.read_index(index, step)
        files.require_space(self.scratch, checkpoint.num_bytes)
        if with_run:
            for name, content in stored.run_files.items():
                self._fetch(stored.folder, name, self.scratch, content)
        target = checkpoint.directory

        def fetch(name: str) -> None:
            self._fetch(stored.folder, name, target, checkpoint.files[name])

        in_parallel(fetch, sorted(checkpoint.files), f"step {step}", logger.info)
        return verify(target, index.run)

    def read_index(self, index: MirrorIndex, step: int) -> Checkpoint:
        """Fetch and return a checkpoint's index, without its files."""
        stored, target = index.of(step), files.step_directory(self.scratch, step)
        target.mkdir(parents=True, exist_ok=True)
        self._fetch(stored.folder, files.INDEX, target, stored.index)
        write_text(target / files.MARKER, f"{stored.index.sha256}\n")
        return read_index(target, index.run)

    def bring(self, index: MirrorIndex, step: int, root: Path) -> None:
        """Fetch a checkpoint into the run directory's `root`, where it replaces a damaged one."""
        checkpoint, final = self.get(index, step, with_run=False), files.step_directory(root, step)
        if final.exists():
            retention.remove(final)
        move(checkpoint.directory, final)
        logger.info("fetched step %d from %s", step, self.url)

    def _fetch(self, folder: str, name: str, directory: Path, content: Content) -> None:
        """Fetch a file unless it is there; CheckpointError if the store has other content."""
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
        """The store for uploads; opened on first use, because importing its SDK takes seconds."""
        return WritableStore(self.url, self.scratch, self._policy)

    def put(self, name: str, path: Path, content: Content, check: Check) -> None:
        """Upload a file unless the store has it; DataError unless the store then has `content`."""
        check()
        self.writable.put(name, path, content)

    def remove_unnamed(self, index: MirrorIndex, check: Check) -> None:
        """Remove folders that the index does not name, their markers first."""
        names = index.unnamed(self.writable.names())
        markers = [name for name in names if name.endswith(f"/{files.MARKER}")]
        for group in (markers, [name for name in names if name not in markers]):
            if group:
                check()
                self.writable.delete(group)
