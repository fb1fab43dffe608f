"""Checkpoints on a disk, the run directory's or a node's own, and their publication. Torch-free.

A save writes into a hidden directory, in this order:

    1. every rank: its safetensors file, hashed while it is written and then fsynced
    2. every rank: its report to rank 0, with size and hash, once the file is on disk
    3. rank 0, once it has all reports and sees all their files: index.json, which merges them
    4. rank 0: COMPLETE, the marker, which holds the SHA-256 of index.json
    5. rank 0: the rename to step-N, and an fsync of the parent directory

JSON and marker are themselves written to a temporary file, fsynced and renamed
(`foundation.files`). So at any moment a crash or a power cut leaves either no directory of that
step or a whole one, and never touches older checkpoints.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.files import move, named_errors, own_file, sha256_of, sync_file, write_text
from foundation.typed_values import json_text
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import retention
from pretrain.checkpoint.directory import INDEX, MARKER
from pretrain.checkpoint.facts import Destination
from pretrain.checkpoint.index import INDEX_FORMAT, Checkpoint, read_index
from pretrain.checkpoint.pieces import merged_pieces
from pretrain.checkpoint.retention import remove
from pretrain.checkpoint.verify import check_sizes, verify
from pretrain.errors import CheckpointError

Check = Callable[[], None]  # raises if the work must stop: a transfer canceled, a run taken over
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

    Before a checkpoint gets its final name, the file `relies_on` (metrics.jsonl, which a resume
    needs) is synced, and `may_write` raises UserError if a newer attempt has claimed the run. After
    the rename, `tell` records the publication.
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
        """Make the directory that ranks write into; CheckpointError without space for the files.

        Only the rank that publishes makes it: where a mount is lost, another rank would make a
        directory of its own, which no other rank sees.
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
            sync_file(self.relies_on)  # else a start would find the step without its metrics
        publish(self.partial(step), final, dict(index), reports, self.may_write)
        self.tell(step, self.destination)

    def discard(self, step: int) -> None:
        """Remove the files of the step that this attempt has written and not published."""
        retention.discard_partial(self.partial(step))

    def steps(self) -> list[int]:
        return files.steps_on_disk(self.root)

    def get(self, step: int) -> Checkpoint:
        return verify(files.step_directory(self.root, step), self.run_id)

    def remove_undone(self, published: int) -> None:
        """Remove other attempts' checkpoints after step `published`, which this one has published.

        Until that publication they are the newest checkpoints of the run, so they stay.
        """
        for step in self.steps():
            directory = files.step_directory(self.root, step)
            if step > published and not self._is_own(directory):
                retention.remove(directory)

    def _is_own(self, directory: Path) -> bool:
        with contextlib.suppress(CheckpointError):
            return read_index(directory).attempt == self.attempt
        return False


def publish(
    partial: Path,
    final: Path,
    index: dict[str, Any],
    reports: Sequence[Mapping[str, Any]],
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Write index and marker from the reports of all ranks, rename to `final` (rank 0 only).

    `before_rename` is called at the last moment at which the checkpoint can still be withheld.
    """
    lists = {
        "pieces": merged_pieces(report["pieces"] for report in reports),
        "ranks": [
            {name: value for name, value in report.items() if name != "pieces"}
            for report in reports
        ],
    }
    check_sizes(partial, lists["ranks"])  # a rank may have written into a directory of its own
    write_index(partial, {**index, "format": INDEX_FORMAT, **lists})
    before_rename()
    if final.exists():  # an invalid one that resuming skipped, or one from before a rewind
        remove(final)
    move(partial, final)


def write_index(directory: Path, index: Mapping[str, Any]) -> None:
    """Write the index of a checkpoint and its marker."""
    # One line per field: Python takes a second to write indented JSON of thousands of ranks.
    lines = sorted(f"{json_text(k)}: {json_text(v, sort_keys=True)}" for k, v in index.items())
    write_text(directory / INDEX, "{\n" + ",\n".join(lines) + "\n}\n")
    write_text(directory / MARKER, sha256_of(directory / INDEX) + "\n")
