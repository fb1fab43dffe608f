"""Verifying checkpoints, and finding the latest valid one. Torch-free.

`verify` alone decides whether a checkpoint is good: marker -> index -> files is a chain of hashes
over every byte, which anything truncated, exchanged between ranks or copied from another step
breaks. It reads everything, so the questions that are asked often (what to prune, how far a run is)
go to `counts`: marker, index and sizes are right, and no start has rejected the checkpoint, which
leaves a note in it (`REFUSED`). There is no `latest` link to go stale: the latest valid checkpoint
is found by verifying from the end.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundation.files import Content, read_together, sha256_of, write_text
from pretrain.checkpoint.directory import INDEX, REFUSED, rank_file, step_directory, steps_on_disk
from pretrain.checkpoint.index import Checkpoint, Lease, read_index, read_whole, reading
from pretrain.checkpoint.pieces import rank_elements, require_pieces
from pretrain.errors import CheckpointError, OtherVersionError, PrunedError, UnreadableError

UNDONE = "from before the run went back"  # starts the note of a step that its history left
MOST_REFUSED_BYTES = 1 << 28  # of indexes that are read in vain for the latest step


def rank_share(sizes: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return the numbers of the files that a rank hashes: consecutive ones, of equal bytes.

    A rank hashes about what it will read if the ranks that saved were the same, so that its node
    has that in memory by then. With more ranks than files, some have nothing.
    """
    total = sum(sizes) or 1
    share, before = [], 0
    for number, size in enumerate(sizes):
        middle = min(before + size / 2, total - 0.5)
        if int(middle * world_size / total) == rank:
            share.append(number)
        before += size
    return share


def verify(directory: Path, run_id: str = "") -> Checkpoint:
    """Read and check a checkpoint of the run; CheckpointError names the first file that is wrong.

    Whatever keeps a file from being read is an error of that kind, too. A step that a run made
    again meanwhile is read again.
    """
    while True:
        before = _identity(directory)
        try:
            checkpoint = read_index(directory, run_id)
            check_share(checkpoint)
        except CheckpointError:
            if _identity(directory) in (before, None):
                raise
        else:
            return checkpoint


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return what another directory of the same name does not share; None if there is none."""
    with contextlib.suppress(OSError):
        status = directory.stat()
        return status.st_ino, status.st_ctime_ns
    return None


def verify_and_keep(directory: Path, run_id: str = "") -> Checkpoint:
    """Verify a checkpoint of a run that may train: it is not pruned as long as the result is there.

    PrunedError if it was before. Where nothing can be locked, it may go at any moment.
    """
    lease = Lease(directory)
    try:
        return replace(verify(directory, run_id), lease=lease)
    except CheckpointError:
        if directory.is_symlink() or directory.exists():
            raise
        raise PrunedError(f"{directory}: pruned while it was read") from None


def check_share(checkpoint: Checkpoint, rank: int = 0, world_size: int = 1) -> None:
    """Read and check a rank's share of the files; CheckpointError as above.

    Ranks that verify together call it after one of them has read the index for all.
    """
    sizes = [report["bytes"] for report in checkpoint.rank_reports]
    for number in rank_share(sizes, rank, world_size):
        path = checkpoint.directory / rank_file(number)
        _check_contents(path, checkpoint.files[path.name])
        require_pieces(path, rank_elements(checkpoint.pieces, number))


def counts(directory: Path) -> bool:
    """Return whether marker, index and sizes are right and no start has refused the checkpoint."""
    try:
        check_sizes(directory, read_index(directory).rank_reports)
        return not (directory / REFUSED).exists()
    except (CheckpointError, OSError):
        return False


def steps_that_count(root: Path) -> list[int]:
    """Return the steps of the checkpoints that `counts`, oldest first."""
    return [step for step in steps_on_disk(root) if counts(step_directory(root, step))]


def latest_step(root: Path, before: int | None = None) -> int:
    """Return how far a run is: the step of its latest checkpoint that `counts`; 0 if none does.

    Gives up after MOST_REFUSED_BYTES of wrong indexes: sparse files cost another user nothing.
    """
    left = MOST_REFUSED_BYTES
    for step in reversed(steps_on_disk(root)):
        if before is None or step < before:
            if counts(directory := step_directory(root, step)):
                return step
            with contextlib.suppress(OSError):
                left -= (directory / INDEX).stat().st_size
            if left < 0:
                break
    return 0


def latest_valid(root: Path, say: Callable[[str], None], run_id: str = "") -> Checkpoint | None:
    """Return the latest checkpoint that verifies and belongs to the run; None without checkpoints.

    `say` gets a line for each checkpoint that is skipped. Raises CheckpointError if there are
    checkpoints and none is valid: to start from scratch would throw the run away. One of another
    version is not damaged: OtherVersionError.
    """
    while True:
        steps = [step for step in steps_on_disk(root) if not is_undone(step_directory(root, step))]
        valid, rejected, was_pruned = None, list[CheckpointError](), False
        for step in reversed(steps):
            try:
                valid = verify_and_keep(step_directory(root, step), run_id)
                break
            except OtherVersionError:
                raise
            except PrunedError:
                was_pruned = True
            except CheckpointError as error:
                rejected.append(error)
        if valid is not None or not was_pruned:
            break  # else newer ones are there by now
    for error in rejected:
        say(rejection(str(error), step_name(valid)))
    if steps and valid is None:
        may_pass = any(isinstance(error, UnreadableError) for error in rejected)
        raise (UnreadableError if may_pass else CheckpointError)(
            f"{root}: none of its {len(rejected)} checkpoints is valid; of the latest, "
            f"{rejected[0]}; put back a copy, or start the run to resume from its mirror"
        )
    return valid


def rejection(reason: str, used: str = "") -> str:
    """Return the line about a checkpoint that is skipped, and what is `used` instead."""
    return f"checkpoint rejected: {reason}" + (f"; using {used}" if used else "")


def step_name(checkpoint: Checkpoint | None) -> str:
    """Return `step 100`, or '' for None."""
    return f"step {checkpoint.step}" if checkpoint else ""


def note_refusal(directory: Path, refused: str) -> None:
    """Note in the checkpoint why it was refused, for `counts`; '' removes the note."""
    # A disk that cannot be written does not matter: the next start reads everything again.
    with contextlib.suppress(OSError):
        if refused:
            write_text(directory / REFUSED, refused + "\n")
        else:
            (directory / REFUSED).unlink(missing_ok=True)


def is_undone(directory: Path) -> bool:
    """Return whether a start has noted that the run went back behind the checkpoint."""
    with contextlib.suppress(CheckpointError):
        return read_whole(directory / REFUSED).startswith(UNDONE.encode())
    return False


def _check_contents(path: Path, content: Content) -> None:
    _check_size(path, content.bytes)
    with reading(path):
        sha256 = sha256_of(path)
    if sha256 != content.sha256:
        raise CheckpointError(f"{path}: its contents changed since it was written")


def check_sizes(directory: Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError unless all ranks' files are there, with the sizes that they report."""
    sizes = {directory / rank_file(rank): report["bytes"] for rank, report in enumerate(reports)}
    read_together(lambda path: _check_size(path, sizes[path]), list(sizes))


def _check_size(path: Path, expected: int) -> None:
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a file")
    if status.st_size != expected:
        raise CheckpointError(f"{path}: found {status.st_size} bytes, expected {expected}")
