"""A run directory from a mirror, on a machine that never saw the run's disk. Torch-free.

Everything is checked before it gets its name: mirror.json field by field, then each file by size
and SHA-256, then the checkpoint as every start does it. It arrives in a hidden directory and moves
into place in this order: metrics, ledger, settings, checkpoint, run.json. Without run.json there is
no run, so whenever this is killed, the same call goes on with what has arrived.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.corpora.copy_corpus import in_parallel
from data_pipeline.corpora.fetch import NotFetchedError, fetch_file
from data_pipeline.corpora.stores import RetryPolicy, store_at
from data_pipeline.corpora.writable_store import Content, size_problem
from foundation.errors import CheckpointError, ConfigError, UserError
from foundation.files import fsync_directory, lines_of, parse_json, path_below, write_text
from foundation.settings import load_config
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.config.run import RunConfig
from pretrain.mirror.layout import (
    LARGEST_ROOT_BYTES,
    ROOT,
    ListedContent,
    MirrorIndex,
    StoredCheckpoint,
    parse,
)
from pretrain.rundir.events import Restored
from pretrain.rundir.ledger import Ledger
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)
SCRATCH = ".restore.tmp"  # in the run directory: renames need the same file system
# Where the run was, it was another cluster's: jobs with these numbers may be anybody's here.
EVENTS_OF_JOBS = ("submitted", "job_started", "job_ended", "supervisor_killed", "canceled")


def restore_run(url: str, directory: Path, retry_policy: RetryPolicy | None = None) -> int:
    """Make a run directory that resumes from the latest checkpoint at `url`; returns its step.

    A directory that holds the run already stays as it is, if it has got as far: ConfigError if not,
    or if it holds another run. A checkpoint that is not what its index says is named and left out;
    CheckpointError if none is left. A store that does not answer is an error (DataError), never a
    reason to take an older one.
    """
    fetch = _Fetch(url.rstrip("/"), directory / SCRATCH, retry_policy or RetryPolicy())
    run_dir, existed = RunDir(directory), directory.exists()
    try:
        with run_dir.locked("restore"):
            return _restore(fetch, run_dir)
    except UserError:
        if not existed:  # a wrong URL leaves nothing; files that have arrived stay
            _remove_if_empty(fetch.scratch, run_dir)
        raise


def _restore(fetch: _Fetch, run_dir: RunDir) -> int:
    fetch.scratch.mkdir(exist_ok=True)
    index = fetch.index()
    if run_dir.exists():
        shutil.rmtree(fetch.scratch)
        return _step_here(RunDir.open(run_dir.path), index, fetch.url)
    for found in reversed(index.checkpoints):
        try:
            fetch.checkpoint(found, index.run)
        except CheckpointError as error:
            logger.warning(marker.refusal(str(error)))
            continue
        if run_dir.exists():
            raise ConfigError(
                f"{run_dir.path}: another run began here during the download; choose another run "
                "directory with --run-dir"
            )
        _move_into_place(fetch.scratch, run_dir, found.step, fetch.url)
        logger.info("restored step %d from %s", found.step, fetch.url)
        return found.step
    raise CheckpointError(
        f"{fetch.url}: none of its {len(index.checkpoints)} checkpoints is valid; give the URL of "
        "another mirror"
    )


def _remove_if_empty(scratch: Path, run_dir: RunDir) -> None:
    if not any(each.is_dir() for each in scratch.iterdir()):
        shutil.rmtree(scratch)
        run_dir.remove_unused()


def _step_here(run_dir: RunDir, index: MirrorIndex, url: str) -> int:
    """The step of a run that is on this disk already, if the mirror has nothing newer of it."""
    if run_dir.identity.id != index.run:
        raise ConfigError(
            f"{run_dir.path} holds run {run_dir.identity.id}, {url} has run {index.run}; "
            "choose another run directory with --run-dir"
        )
    here = marker.latest_step(run_dir.checkpoints)
    there = max((each.step for each in index.checkpoints), default=0)
    if there > here:
        raise ConfigError(
            f"{run_dir.path} has reached step {here}, {url} has step {there} of the same run; "
            "choose another run directory, or leave out --from to continue what is on this disk"
        )
    logger.info("%s has step %d of this run already: nothing to restore", run_dir.path, here)
    return here


@dataclass(frozen=True)
class _Fetch:
    """Files of a mirror, into `scratch`."""

    url: str
    scratch: Path
    retry_policy: RetryPolicy

    def index(self) -> MirrorIndex:
        """Return mirror.json; DataError if there is none."""
        path = self.scratch / ROOT
        self._file(
            "", ROOT, path, partial(size_problem, most=LARGEST_ROOT_BYTES), LARGEST_ROOT_BYTES
        )
        index = parse(f"{self.url}/{ROOT}", path.read_bytes())
        if not index.checkpoints:
            raise CheckpointError(f"{self.url}: it has no checkpoint yet; start the run without it")
        return index

    def checkpoint(self, found: StoredCheckpoint, run_id: str) -> None:
        """Fetch a checkpoint and the run's files with it; CheckpointError unless all is right.

        What is there already from an interrupted call is not fetched again.
        """
        target = files.step_directory(self.scratch, found.step)
        target.mkdir(exist_ok=True)
        self._content(found.folder, files.INDEX, target, found.index)
        write_text(target / files.MARKER, f"{found.index.sha256}\n")
        checkpoint = marker.read_index(target)
        listed = checkpoint.index["files"]
        files.require_space(self.scratch, checkpoint.num_bytes)
        for name, content in found.run_files.items():
            self._content(found.folder, name, self.scratch, content)

        def fetch(name: str) -> None:
            self._content(found.folder, name, target, ListedContent.of(listed[name]))

        in_parallel(fetch, sorted(listed), f"step {found.step}", logger.info)
        marker.verify(target, run_id)
        self._check_run(run_id)

    def _check_run(self, run_id: str) -> None:
        """Raise CheckpointError unless the run's files are those of the run."""
        run_dir = RunDir(self.scratch)
        try:
            found = run_dir.identity.id
            load_config(RunConfig, run_dir.config_file)
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        if found != run_id:
            raise CheckpointError(f"{run_dir.path}: found run {found}, expected run {run_id}")

    def _content(
        self, folder: str, name: str, directory: Path, content: Content | ListedContent
    ) -> None:
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
            self._file(folder, name, path, check, content.bytes)
        except NotFetchedError as error:
            if problem or error.is_absent:
                raise CheckpointError(str(error)) from None
            raise

    def _file(
        self, folder: str, name: str, path: Path, check: Callable[[Path], str | None], size: int
    ) -> None:
        store = store_at(f"{self.url}/{folder}".rstrip("/"), self.retry_policy)
        fetch_file(store, name, path, self.scratch, check, size)


def _move_into_place(scratch: Path, run_dir: RunDir, step: int, url: str) -> None:
    """Make the run directory of what has arrived, run.json last."""
    lines = [line for each in lines_of(scratch / "ledger.jsonl") if (line := _line_here(each))]
    write_text(scratch / "ledger.jsonl", b"".join(lines).decode())
    Ledger(scratch / "ledger.jsonl").append(Restored(step=step, url=url))
    os.chmod(scratch / "config.yaml", 0o600)
    for directory in (run_dir.checkpoints, run_dir.logs):
        directory.mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "ledger.jsonl", "config.yaml"):
        os.replace(scratch / name, run_dir.path / name)
    final = files.step_directory(run_dir.checkpoints, step)
    if final.exists():
        files.remove(final)
    files.step_directory(scratch, step).rename(final)
    fsync_directory(run_dir.checkpoints)
    os.replace(scratch / "run.json", run_dir.path / "run.json")
    fsync_directory(run_dir.path)
    shutil.rmtree(scratch)


def _line_here(line: bytes) -> bytes:
    """The line of the ledger without what only meant something on the cluster it comes from."""
    with contextlib.suppress(ValueError):
        event: Any = parse_json(line)
        if isinstance(event, dict):
            if event.get("event") in EVENTS_OF_JOBS:
                return b""
            event.pop("job", None)
            return json.dumps(event).encode() + b"\n"
    return b""  # no reader could use it either
