"""A run directory from a mirror, on a machine that never saw the run's disk. Torch-free.

Everything is checked before it gets its name: mirror.json field by field, then each file by size
and SHA-256, then the checkpoint as every start does it. It arrives in a hidden directory and moves
into place in this order: metrics, ledger, settings, checkpoint, run.json. Without run.json there is
no run, so whenever this is killed, the same call goes on with what has arrived.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

from data_pipeline.corpora.stores import RetryPolicy
from foundation.errors import CheckpointError, ConfigError, UserError
from foundation.files import fsync_directory, write_text
from foundation.settings import load_config
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.destinations import MirrorIndex, ObjectStore
from pretrain.config.run import RunConfig
from pretrain.rundir.events import (
    AttemptEnded,
    Canceled,
    JobEnded,
    JobStarted,
    NodeReplaced,
    Restored,
    Submitted,
    SupervisorKilled,
)
from pretrain.rundir.ledger import Ledger, line_of
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)
SCRATCH = ".restore.tmp"  # in the run directory: renames need the same file system
# Where the run was, it was another cluster's: jobs with these numbers may be anybody's here.
EVENTS_OF_JOBS = (Submitted, JobStarted, JobEnded, SupervisorKilled, NodeReplaced, Canceled)


def restore_run(url: str, directory: Path, retry_policy: RetryPolicy | None = None) -> int:
    """Make a run directory that resumes from the latest checkpoint at `url`; returns its step.

    A directory that holds the run already stays as it is, if it has got as far: ConfigError if not,
    or if it holds another run. A checkpoint that is not what its index says is named and left out;
    CheckpointError if none is left. A store that does not answer is an error (DataError), never a
    reason to take an older one.
    """
    store = ObjectStore(url, directory / SCRATCH, retry_policy)
    run_dir, existed = RunDir(directory), directory.exists()
    try:
        with run_dir.locked("restore"):
            return _restore(store, run_dir)
    except UserError:
        # A wrong URL leaves nothing; files that have arrived stay.
        if not existed and not any(each.is_dir() for each in store.scratch.iterdir()):
            shutil.rmtree(store.scratch)
            run_dir.remove_unused()
        raise


def _restore(store: ObjectStore, run_dir: RunDir) -> int:
    store.scratch.mkdir(exist_ok=True)
    index = store.index()
    steps = [each.step for each in index.checkpoints]
    if not steps:
        raise CheckpointError(f"{store.url}: it has no checkpoint yet; start the run without it")
    if run_dir.exists():
        shutil.rmtree(store.scratch)
        return _step_here(RunDir.open(run_dir.path), index, store.url)

    def get(step: int) -> marker.Checkpoint:
        checkpoint, arrived = store.get(index, step), RunDir(store.scratch)
        try:
            run_id = arrived.identity.id
            load_config(RunConfig, arrived.config_file)
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        if run_id != index.run:
            raise CheckpointError(f"{arrived.path}: found run {run_id}, expected run {index.run}")
        return checkpoint

    found, refused = marker.newest_valid(steps, get)
    for _, error in refused:
        logger.warning(marker.refusal(str(error)))
    if found is None:
        raise CheckpointError(
            f"{store.url}: none of its {len(steps)} checkpoints is valid; give the URL of another "
            "mirror"
        )
    if run_dir.exists():
        raise ConfigError(
            f"{run_dir.path}: another run began here during the download; choose another run "
            "directory with --run-dir"
        )
    _move_into_place(store.scratch, run_dir, found.step, store.url)
    logger.info("restored step %d from %s", found.step, store.url)
    return found.step


def _step_here(run_dir: RunDir, index: MirrorIndex, url: str) -> int:
    """The step of a run that is on this disk already, if the mirror has nothing newer of it."""
    if run_dir.identity.id != index.run:
        raise ConfigError(
            f"{run_dir.path} holds run {run_dir.identity.id}, {url} has run {index.run}; "
            "choose another run directory"
        )
    here = marker.latest_step(run_dir.checkpoints)
    there = max((each.step for each in index.checkpoints), default=0)
    if there > here:
        raise ConfigError(
            f"{run_dir.path} has reached step {here}, {url} has step {there} of the same run; "
            "choose another run directory, or continue what is on this disk"
        )
    logger.info("%s has step %d of this run already: nothing to restore", run_dir.path, here)
    return here


def _move_into_place(scratch: Path, run_dir: RunDir, step: int, url: str) -> None:
    """Make the run directory of what has arrived, run.json last."""
    ledger = Ledger(scratch / "ledger.jsonl")
    events = [
        replace(event, job=None) if isinstance(event, AttemptEnded) else event
        for event in ledger.read()
        if not isinstance(event, EVENTS_OF_JOBS)
    ]
    write_text(ledger.path, b"".join(map(line_of, events)).decode())
    ledger.append(Restored(step=step, url=url))
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
