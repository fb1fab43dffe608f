"""Restoring a run directory from a mirror, on a machine without the run's disk. Torch-free.

Files are fetched into a hidden directory and checked there: mirror.json field by field, each file
by size and SHA-256, then the checkpoint as at every start. Then they are moved into place in this
order: metrics, ledger, settings, checkpoint, run.json. A directory without run.json is no run, so
if the process is killed, the same call continues with the files that it has.
"""

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

from data_pipeline.corpora.web_requests import RetryPolicy
from foundation.errors import ConfigError, UserError
from foundation.files import make_directory, move, write_text
from foundation.settings import load_config
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import retention
from pretrain.checkpoint.object_store import SCRATCH, MirrorIndex, ObjectStore
from pretrain.checkpoint.verify import verify
from pretrain.config.run import RunConfig
from pretrain.errors import CheckpointError
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
from pretrain.rundir.ledger import Ledger, event_line
from pretrain.rundir.metrics_file import summarize_file
from pretrain.rundir.run_dir import RunDir

logger = logging.getLogger(__name__)
# Events of Slurm jobs are not restored: here the same numbers can be jobs of other users.
EVENTS_OF_JOBS = (Submitted, JobStarted, JobEnded, SupervisorKilled, NodeReplaced, Canceled)


def restore_run(
    url: str, directory: Path, retry_policy: RetryPolicy | None = None, step: int | None = None
) -> int:
    """Make a run directory that resumes from the latest checkpoint at `url`, or from `step`.

    Returns the step. If the directory already holds the run, only the checkpoint is put there,
    unless a valid one is there. Raises ConfigError if the directory holds another run, or a copy
    that has not reached the step; CheckpointError if the checkpoint is damaged. That error names
    the previous step, because only the user may decide to go back further.
    """
    store = ObjectStore(url, directory / SCRATCH, retry_policy)
    run_dir, existed = RunDir(directory), directory.exists()
    with run_dir.locked("restore"):
        store.scratch.mkdir(exist_ok=True)
        try:
            return _restore(store, run_dir, step)
        except UserError:
            # After a wrong URL remove the new directory; keep files that were fetched.
            if not existed and not any(entry.is_dir() for entry in store.scratch.iterdir()):
                shutil.rmtree(store.scratch)
                run_dir.remove_unused()
            raise


def _restore(store: ObjectStore, run_dir: RunDir, asked: int | None) -> int:
    index = store.index()
    steps = [stored.step for stored in index.checkpoints]
    if not steps:
        raise CheckpointError(f"{store.url}: it has no checkpoint yet; start the run without it")
    step = steps[-1] if asked is None else asked
    if step not in steps:
        raise ConfigError(f"{store.url} has no step {step}; it has {', '.join(map(str, steps))}")
    try:
        if run_dir.exists():
            _repair(store, index, RunDir.open(run_dir.path), step)
            return step
        store.get(index, step)
        if (run_id := RunDir(store.scratch).identity.id) != index.run:
            raise CheckpointError(f"{store.url}: found run {run_id}, expected run {index.run}")
        load_config(RunConfig, RunDir(store.scratch).config_file)
    except CheckpointError as error:
        before = [earlier for earlier in steps if earlier < step]
        advice = (
            f"take the previous one with --step {before[-1]}" if before else "use another mirror"
        )
        where = "" if store.url in str(error) else f"{store.url}: "
        raise CheckpointError(f"{where}{error}; {advice}") from None
    if run_dir.exists():
        raise ConfigError(
            f"{run_dir.path}: another run began here during the download; choose another run "
            "directory with --run-dir"
        )
    _move_into_place(store.scratch, run_dir, step, store.url)
    logger.info("restored step %d from %s", step, store.url)
    return step


def _repair(store: ObjectStore, index: MirrorIndex, run_dir: RunDir, step: int) -> None:
    """Put a checkpoint into a run directory whose ledger and metrics reach its step."""
    run_id, root = run_dir.identity.id, run_dir.checkpoints
    if run_id != index.run:
        raise ConfigError(
            f"{run_dir.path} holds run {run_id}, {store.url} has run {index.run}; choose another "
            "run directory"
        )
    if (reached := summarize_file(run_dir.metrics).step) < step:
        raise ConfigError(
            f"{run_dir.path} has measured {reached} steps, {store.url} has step {step} of the same "
            "run; choose another run directory"
        )
    with run_dir.locked():
        try:
            verify(files.step_directory(root, step), run_id)
            logger.info("%s has step %d of this run already", run_dir.path, step)
        except CheckpointError:
            make_directory(root)
            store.bring(index, step, root)
    shutil.rmtree(store.scratch)


def _move_into_place(scratch: Path, run_dir: RunDir, step: int, url: str) -> None:
    """Move the fetched files into the run directory, run.json last."""
    ledger = Ledger(scratch / "ledger.jsonl")
    events = [
        replace(event, job=None) if isinstance(event, AttemptEnded) else event
        for event in ledger.read()
        if not isinstance(event, EVENTS_OF_JOBS)
    ]
    write_text(ledger.path, b"".join(map(event_line, events)).decode())
    ledger.append(Restored(step=step, url=url))
    os.chmod(scratch / "config.yaml", 0o600)
    for directory in (run_dir.checkpoints, run_dir.logs):
        make_directory(directory)
    for name in ("metrics.jsonl", "ledger.jsonl", "config.yaml"):
        move(scratch / name, run_dir.path / name)
    final = files.step_directory(run_dir.checkpoints, step)
    if final.exists():
        retention.remove(final)
    move(files.step_directory(scratch, step), final)
    move(scratch / "run.json", run_dir.path / "run.json")
    shutil.rmtree(scratch)
