"""Checkpoint directories: how one comes to count, how it is checked, and which is the newest good one. Torch-free.

    RUN/checkpoints/step-00000100/
        engine-00000.safetensors   fragments of weights and moments, one file per rank
        state-00000.safetensors    lane memories and random-number state, one file per rank
        rank-00000.json            what this rank wrote: sizes, SHA-256, its lanes and their cursor; written after both
        index.json                 everything above joined, and what the run was
        COMPLETE                   SHA-256 of index.json; written last, then the directory gets its name

Nothing is published before every file is on disk, so a crash at any moment leaves the older checkpoints as they were.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import CheckpointError
from data_pipeline.files import fsync_directory, sha256_of, write_json, write_text

FORMAT = 1
MARKER = "COMPLETE"
INDEX = "index.json"
STEP_NAME = re.compile(r"step-(\d{8})")
POLL_SECONDS = 0.02


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies once it counts."""
    return root / f"step-{step:08d}"


def partial_directory(root: Path, step: int, attempt: str) -> Path:
    """Where it is written; named by the attempt, so that a rank left over from another attempt can not add to it."""
    return root / f".partial-{step:08d}-{attempt}"


def rank_file(kind: str, rank: int) -> str:
    """The name of one rank's file of a kind: engine, state or rank."""
    return f"{kind}-{rank:05d}.{'json' if kind == 'rank' else 'safetensors'}"


def steps_on_disk(root: Path) -> list[int]:
    """Steps of all published checkpoints, damaged ones included, oldest first."""
    if not root.is_dir():
        return []
    matches = (STEP_NAME.fullmatch(entry.name) for entry in root.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint whose files were found whole."""

    directory: Path
    index: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.index["step"])


def publish(
    partial: Path,
    final: Path,
    index: dict[str, Any],
    num_ranks: int,
    while_waiting: Callable[[], None] = lambda: None,
    before_naming: Callable[[], None] = lambda: None,
) -> None:
    """Wait for every rank's list of files, write index and marker, and give the directory its name (rank 0 only).

    `while_waiting` is called again and again and may raise to give up, `before_naming` once, at the last moment.
    """
    reports = [
        _wait_for_json(partial / rank_file("rank", rank), while_waiting)
        for rank in range(num_ranks)
    ]
    files = {name: entry for report in reports for name, entry in report["files"].items()}
    write_json(partial / INDEX, {**index, "format": FORMAT, "files": files, "ranks": reports})
    write_text(partial / MARKER, sha256_of(partial / INDEX) + "\n")
    before_naming()
    if final.exists():  # a refused one, or one that a rewind went behind
        _remove(final)
    partial.rename(final)
    fsync_directory(final.parent)


def verify(directory: Path) -> Checkpoint:
    """Read and check a whole checkpoint; raises CheckpointError naming the first file that is not as it was written."""
    marker, index_path = directory / MARKER, directory / INDEX
    if not marker.is_file():
        raise CheckpointError(
            f"{directory}: no {MARKER} marker, so it was never finished; it cannot be used"
        )
    if not index_path.is_file():
        raise CheckpointError(f"{index_path}: missing; the checkpoint cannot be used")
    if sha256_of(index_path) != marker.read_text().strip():
        raise CheckpointError(
            f"{index_path}: does not match its {MARKER} marker; the checkpoint cannot be used"
        )
    index = json.loads(index_path.read_text())
    if index["format"] != FORMAT:
        raise CheckpointError(
            f"{index_path}: format {index['format']}, this version reads format {FORMAT}"
        )
    named = STEP_NAME.fullmatch(directory.name)
    if named and int(named.group(1)) != index["step"]:
        raise CheckpointError(
            f"{directory}: holds the checkpoint of step {index['step']}; it cannot be used as it is"
        )
    for rank in range(index["world_size"]):
        if not {rank_file("engine", rank), rank_file("state", rank)} <= index["files"].keys():
            raise CheckpointError(
                f"{index_path}: rank {rank} of {index['world_size']} is missing; it cannot be used"
            )
    for name in index["files"]:
        _check_file(directory, name, index["files"])
    return Checkpoint(directory, index)


def latest_valid(root: Path, say: Callable[[str], None], run_id: str = "") -> Checkpoint | None:
    """The newest checkpoint that verifies and belongs to the run, if it is given; each one passed over is said by name.

    None if there is none at all. Raises CheckpointError if there are checkpoints and none of them is good: starting
    afresh would lose the run.
    """
    steps = steps_on_disk(root)
    for step in reversed(steps):
        try:
            found = verify(step_directory(root, step))
            _check_run(found, run_id)
            return found
        except CheckpointError as error:
            say(f"checkpoint refused: {error}")
    if steps:
        raise CheckpointError(
            f"{root}: none of its {len(steps)} checkpoints is good; repair or remove them, or use a new run directory"
        )
    return None


def remove_partial(root: Path) -> None:
    """Clear away what crashed saves left behind (rank 0, before the first save of an attempt)."""
    for entry in root.glob(".partial-*"):
        shutil.rmtree(entry, ignore_errors=True)


def require_space(root: Path, num_bytes: int) -> None:
    """CheckpointError if the file system of `root` has no room for so many bytes more."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < num_bytes:
        raise CheckpointError(
            f"{root}: {free / 2**20:.1f} MiB are free, {num_bytes / 2**20:.1f} MiB are needed"
        )


def superfluous(
    steps: list[int], keep_last: int, keep_every: int, best: Collection[int] = ()
) -> list[int]:
    """Which of these steps, oldest first, are neither among the newest, nor multiples of `keep_every`, nor `best`."""
    return [
        step
        for step in steps[:-keep_last]
        if not (keep_every and step % keep_every == 0) and step not in best
    ]


def best_steps(root: Path, count: int) -> list[int]:
    """The steps of the `count` checkpoints with the lowest validation loss, best first; of equal ones, the later."""
    if not count:
        return []
    losses = {step: validation_loss(step_directory(root, step)) for step in steps_on_disk(root)}
    ranked = sorted(
        (loss, -step) for step, loss in losses.items() if loss is not None and not math.isnan(loss)
    )
    return [-negative for _, negative in ranked[:count]]


def validation_loss(directory: Path) -> float | None:
    """What the run measured at that step, as the index says without being checked; None if it did not, or no index."""
    try:
        return json.loads((directory / INDEX).read_text()).get("validation_loss")
    except (OSError, ValueError):
        return None


def prune(root: Path, keep_last: int, keep_every: int = 0, keep_best: int = 0) -> list[int]:
    """Remove the checkpoints that `superfluous` names; returns their steps."""
    removed = superfluous(steps_on_disk(root), keep_last, keep_every, best_steps(root, keep_best))
    for step in removed:
        _remove(step_directory(root, step))
    return removed


def discard_from(root: Path, step: int) -> None:
    """Remove all checkpoints of `step` and later ones: the run goes another way from before it."""
    for found in reversed(steps_on_disk(root)):
        if found >= step:
            _remove(step_directory(root, found))


def _remove(directory: Path) -> None:
    """Take the name away first, at once: what is half removed must not look like a damaged checkpoint."""
    gone = directory.with_name(f".partial-{directory.name}-removed")
    shutil.rmtree(gone, ignore_errors=True)
    directory.rename(gone)
    shutil.rmtree(gone)


def rank_reports(index: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each rank wrote, in rank order."""
    yield from index["ranks"]


def _check_file(directory: Path, name: str, files: dict[str, Any]) -> None:
    path, expected = directory / name, files[name]
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; the checkpoint cannot be used")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(
            f"{path}: {size} bytes, {expected['bytes']} were written; the checkpoint cannot be used"
        )
    found = sha256_of(path)
    if found != expected["sha256"]:
        owner = next((other for other, entry in files.items() if entry["sha256"] == found), None)
        what = (
            f"holds what belongs into {owner}"
            if owner
            else "its contents changed since it was written"
        )
        raise CheckpointError(f"{path}: {what}; the checkpoint cannot be used")


def _check_run(found: Checkpoint, run_id: str) -> None:
    written_by = found.index.get("run", run_id)  # early checkpoints do not say
    if run_id and written_by != run_id:
        raise CheckpointError(
            f"{found.directory}: was written by another run ({written_by}, this one is {run_id})"
        )


def _wait_for_json(path: Path, while_waiting: Callable[[], None]) -> dict[str, Any]:
    while not path.exists():
        while_waiting()
        time.sleep(POLL_SECONDS)
    return json.loads(path.read_text())
