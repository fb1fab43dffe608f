"""The marker of a checkpoint: publishing, verifying, finding the latest valid one. Torch-free.

A save writes into a hidden directory, in this order:

    1. every rank: its two safetensors files, each hashed while it is written and then fsynced
    2. every rank: rank-N.json, with sizes and hashes of those two, once both are on disk
    3. rank 0, once it sees every rank-N.json: index.json, which merges them
    4. rank 0: COMPLETE, the marker, which holds the SHA-256 of index.json
    5. rank 0: the rename to step-N, and an fsync of the parent directory

JSON and marker are themselves written to a temporary file, fsynced and renamed
(`data_pipeline.files`). So at any moment a crash or a power cut leaves either no directory of that
step or a whole one, and never touches older checkpoints. Marker -> index -> files is a chain of
hashes: whatever is truncated, exchanged between ranks or copied from another step breaks it. There
is no `latest` link to go stale: the latest valid checkpoint is found by verifying from the end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import CheckpointError
from data_pipeline.files import fsync_directory, sha256_of, write_json, write_text
from pretrain.checkpoint.directory import (
    INDEX,
    MARKER,
    STEP_NAME,
    rank_file,
    remove,
    step_directory,
    steps_on_disk,
)

FORMAT = 2  # of a checkpoint: file names, keys of tensors and of the index
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint that passed `verify`."""

    directory: Path
    index: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.index["step"])

    @property
    def rank_reports(self) -> list[dict[str, Any]]:
        """The contents of each rank-N.json, in rank order."""
        return self.index["ranks"]


def publish(
    partial: Path,
    final: Path,
    index: dict[str, Any],
    num_ranks: int,
    while_waiting: Callable[[], None] = lambda: None,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Wait for the files of all ranks, write index and marker, rename to `final` (rank 0 only).

    `while_waiting` is called on every poll and may raise to cancel. `before_rename` is called once,
    at the last moment at which the checkpoint can still be withheld.
    """
    # Ranks share nothing but the file system here: a collective in this thread would race with
    # those of the loop.
    reports = [
        _wait_for_json(partial / rank_file("rank", rank), while_waiting)
        for rank in range(num_ranks)
    ]
    files = {name: entry for report in reports for name, entry in report["files"].items()}
    write_json(partial / INDEX, {**index, "format": FORMAT, "files": files, "ranks": reports})
    write_text(partial / MARKER, sha256_of(partial / INDEX) + "\n")
    before_rename()
    if final.exists():  # an invalid one that resuming skipped, or one from before a rewind
        remove(final)
    partial.rename(final)
    fsync_directory(final.parent)


def verify(directory: Path) -> Checkpoint:
    """Read and check a whole checkpoint; CheckpointError names the first file that was changed."""
    marker, index_path = directory / MARKER, directory / INDEX
    if not marker.is_file():
        raise CheckpointError(f"{directory}: no {MARKER} marker, so it was never finished")
    if not index_path.is_file():
        raise CheckpointError(f"{index_path}: missing")
    if sha256_of(index_path) != marker.read_text().strip():
        raise CheckpointError(f"{index_path}: does not match its {MARKER} marker")
    index = json.loads(index_path.read_text())
    if index["format"] != FORMAT:
        raise CheckpointError(
            f"{index_path}: found format {index['format']}, expected format {FORMAT}; "
            "resume with the version that wrote it, or use a new run directory"
        )
    named = STEP_NAME.fullmatch(directory.name)
    if named and int(named.group(1)) != index["step"]:
        raise CheckpointError(f"{directory}: contains the checkpoint of step {index['step']}")
    for rank in range(index["world_size"]):
        if not {rank_file("engine", rank), rank_file("state", rank)} <= index["files"].keys():
            raise CheckpointError(f"{index_path}: rank {rank} of {index['world_size']} is missing")
    for name in index["files"]:
        _check_file(directory, name, index["files"])
    return Checkpoint(directory, index)


def latest_valid(root: Path, say: Callable[[str], None], run_id: str = "") -> Checkpoint | None:
    """Return the latest checkpoint that verifies and belongs to the run; None if there are none.

    `say` gets a line for each checkpoint that is skipped. Raises CheckpointError if there are
    checkpoints and none is valid: to start from scratch would throw the run away.
    """
    steps = steps_on_disk(root)
    for step in reversed(steps):
        try:
            found = verify(step_directory(root, step))
            if run_id and found.index["run"] != run_id:
                raise CheckpointError(
                    f"{found.directory}: found a checkpoint of run {found.index['run']}, "
                    f"expected run {run_id}"
                )
            return found
        except CheckpointError as error:
            say(f"checkpoint rejected: {error}")
    if steps:
        raise CheckpointError(
            f"{root}: none of its {len(steps)} checkpoints is valid; repair or remove them, or use "
            "a new run directory"
        )
    return None


def _check_file(directory: Path, name: str, files: dict[str, Any]) -> None:
    path, expected = directory / name, files[name]
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    if (size := path.stat().st_size) != expected["bytes"]:
        raise CheckpointError(f"{path}: found {size} bytes, expected {expected['bytes']}")
    found = sha256_of(path)
    if found == expected["sha256"]:
        return
    # A common accident is a copy of a directory that mixed up the ranks: say so.
    owner = next((other for other, entry in files.items() if entry["sha256"] == found), None)
    raise CheckpointError(
        f"{path}: contains the data of {owner}"
        if owner
        else f"{path}: its contents changed since it was written"
    )


def _wait_for_json(path: Path, while_waiting: Callable[[], None]) -> dict[str, Any]:
    while not path.exists():
        while_waiting()
        time.sleep(POLL_SECONDS)
    return json.loads(path.read_text())
