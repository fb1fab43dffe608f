"""Verifying checkpoints, and finding the latest valid one. Torch-free.

`verify` alone decides whether a checkpoint is valid. The marker has the hash of the index, and the
index the hashes of all files, so a file that is truncated, exchanged between ranks or copied from
another step does not match. `verify` reads every byte. Frequent questions (what to prune, how far a
run is) use `counts` instead: marker, index and sizes are right, and no start has left a note
(`REFUSED`) that it rejected the checkpoint. There is no `latest` link that could be wrong: the
latest valid checkpoint is found by verifying from the newest step back.
"""

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

UNDONE = "from before the run went back"  # the start of the note in an undone checkpoint
MOST_REFUSED_BYTES = 1 << 28  # of wrong indexes, after which `latest_step` gives up


def rank_share(sizes: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return the numbers of the files that a rank hashes: consecutive, about equal bytes per rank.

    With the same number of ranks as at the save, a rank hashes its own file, which is then in its
    node's page cache when the rank loads it. With more ranks than files, some hash nothing.
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

    If the run meanwhile replaces the checkpoint by a new one of the same step, verify the new one.
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
    """Return what differs between this directory and a later one of its name; None if missing."""
    with contextlib.suppress(OSError):
        status = directory.stat()
        return status.st_ino, status.st_ctime_ns
    return None


def verify_and_keep(directory: Path, run_id: str = "") -> Checkpoint:
    """Verify a checkpoint and keep the run, which may be training, from pruning it.

    The returned checkpoint holds a lease for that. Where files cannot be locked, the run may prune
    the checkpoint at any moment. Raises PrunedError if the run has pruned it.
    """
    lease = Lease(directory)
    try:
        return replace(verify(directory, run_id), lease=lease)
    except CheckpointError:
        if directory.is_symlink() or directory.exists():
            raise
        raise PrunedError(f"{directory}: pruned while it was read") from None


def check_share(checkpoint: Checkpoint, rank: int = 0, world_size: int = 1) -> None:
    """Read and check a rank's share of the files; raise CheckpointError as `verify` does.

    When ranks verify together, rank 0 first reads the index for all.
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

    Gives up after MOST_REFUSED_BYTES of wrong indexes: another user could make huge ones at no
    cost, as sparse files.
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

    `say` receives a line for each skipped checkpoint. Raises CheckpointError if there are
    checkpoints and none is valid, and OtherVersionError at one that another version wrote.
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
            break
        # The run pruned a checkpoint meanwhile, so it has a newer one by now: look again.
    for error in rejected:
        say(rejection(str(error), step_name(valid)))
    if steps and valid is None:
        is_transient = any(isinstance(error, UnreadableError) for error in rejected)
        raise (UnreadableError if is_transient else CheckpointError)(
            f"{root}: none of its {len(rejected)} checkpoints is valid; of the latest, "
            f"{rejected[0]}; put back a copy, or start the run to resume from its mirror"
        )
    return valid


def rejection(reason: str, used: str = "") -> str:
    """Return the message that a checkpoint is skipped, and which one is `used` instead."""
    return f"checkpoint rejected: {reason}" + (f"; using {used}" if used else "")


def step_name(checkpoint: Checkpoint | None) -> str:
    """Return `step 100`, or '' for None."""
    return f"step {checkpoint.step}" if checkpoint else ""


def note_refusal(directory: Path, refused: str) -> None:
    """Note in the checkpoint why it was refused, for `counts`; '' removes the note."""
    # The note only saves time, so a disk that cannot be written is no error: the next start
    # verifies the checkpoint again.
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
