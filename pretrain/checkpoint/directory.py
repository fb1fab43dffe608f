"""The directory of a checkpoint: its files, free space, and which checkpoints are kept. Torch-free.

RUN/checkpoints/step-00000100/
    rank-00000.safetensors   one file per rank: fragments of weights and moments, lane memories,
                             random-number state
    index.json               sizes and SHA-256 of all files, what is in them, the ranks' lanes and
                             their cursor, and the run's id, step and settings
    COMPLETE                 the marker: SHA-256 of index.json (`verify.py`)
    REFUSED                  only if a start could not resume from it: the reason
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from foundation.errors import STORAGE_FAILS
from foundation.files import fsync_directory, make_directory, move
from foundation.locks import NoFileLocksError, try_lock
from pretrain.errors import CheckpointError, UnreadableError

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
INDEX = "index.json"
REFUSED = "REFUSED"
MEMORY = "memory."  # starts the keys of lane memories; then comes the part's name
REMOVED = "-removed"  # ends the names of directories that are being removed
STEP_NAME = re.compile(r"step-(\d{8})")


def step_directory(root: Path, step: int) -> Path:
    """Return the path of the published checkpoint of `step`."""
    return root / f"step-{step:08d}"


def partial_directory(root: Path, step: int, attempt: str) -> Path:
    """Return the path of an unpublished checkpoint.

    The attempt is part of the name, so that a surviving rank of an earlier attempt cannot add files
    to this one.
    """
    return root / f".partial-{step:08d}-{attempt}"


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank has written."""
    return f"rank-{rank:05d}.safetensors"


def steps_on_disk(root: Path) -> list[int]:
    """Return the steps of all published checkpoints, oldest first; corrupted ones are included."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        kind = UnreadableError if error.errno in STORAGE_FAILS else CheckpointError
        raise kind(f"{root}: cannot be listed: {error.strerror}") from error
    matches = map(STEP_NAME.fullmatch, names)
    return sorted(int(match.group(1)) for match in matches if match)


def require_space(root: Path, num_bytes: int) -> None:
    """Raise CheckpointError if the file system of `root` has less than `num_bytes` free."""
    if not root.is_dir():
        make_directory(root)
    free = shutil.disk_usage(root).free
    if free < num_bytes:
        raise CheckpointError(
            f"{root}: found {free / 2**20:.1f} MiB free, expected {num_bytes / 2**20:.1f} MiB"
        )


def steps_to_prune(
    steps: list[int],
    valid: Sequence[int],
    keep_last: int,
    keep_every: int,
    held: Collection[int] = (),
    suspected_since: int | None = None,
) -> list[int]:
    """Return the steps before the last `valid` ones, without `held` and multiples of `keep_every`.

    `steps` and `valid` are sorted, oldest first. Invalid steps do not count as kept ones, and are
    removed when they are old. While losses since step `suspected_since` may become a spike, the
    latest valid step before it is not returned: the run would rewind to it.
    """
    oldest_kept = min(valid[-keep_last:], default=0)
    kept = {*held, *[step for step in valid if step < (suspected_since or 0)][-1:]}
    return [
        step
        for step in steps
        if step < oldest_kept and not (keep_every and step % keep_every == 0) and step not in kept
    ]


def prune(
    root: Path,
    valid: Sequence[int],
    keep_last: int,
    keep_every: int = 0,
    suspected_since: int | None = None,
    held: Collection[int] = (),
) -> list[int]:
    """Remove the checkpoints of `steps_to_prune`; returns the steps that could be removed.

    Steps that are `held` stay, as one that is being uploaded, and those that a command reads.
    """
    steps = steps_on_disk(root)
    old = steps_to_prune(steps, valid, keep_last, keep_every, held, suspected_since)
    return [step for step in old if _removed(step_directory(root, step))]


def _removed(directory: Path) -> bool:
    """Remove a checkpoint unless a command reads it (`verify_and_keep`)."""
    with contextlib.ExitStack() as stack:
        try:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, NoFileLocksError):
                if not try_lock(stack.enter_context(open(directory / MARKER, "r+b"))):
                    return False
            remove(directory)
        except OSError as error:  # such as another user's: it must not fail the save that prunes
            logger.warning("%s cannot be removed: %s", directory, error.strerror)
            return False
    return True


def discard_from(root: Path, step: int) -> None:
    """Remove the checkpoints of `step` and all later ones, which a rewind makes invalid.

    A power failure does not bring them back.
    """
    # Latest first: if this is interrupted, no checkpoint after the rewind survives one before it.
    for later in reversed(steps_on_disk(root)):
        if later >= step:
            remove(step_directory(root, later))
    fsync_directory(root)


def remove_partial(root: Path) -> None:
    """Remove what interrupted saves and removals left (rank 0, before an attempt's first save)."""
    for entry in root.glob(".partial-*"):
        discard_partial(entry)


def discard_partial(partial: Path) -> None:
    """Remove an unpublished checkpoint, as far as possible.

    The rename comes first: a rank 0 of an older attempt may be about to publish it. It then finds
    nothing, or has been faster; it never publishes a part.
    """
    renamed = partial
    if not partial.name.endswith(REMOVED):
        renamed = partial.with_name(partial.name + REMOVED)
        _delete(renamed)
        with contextlib.suppress(OSError):
            partial.rename(renamed)
    _delete(renamed)


def remove(directory: Path) -> None:
    """Remove a published checkpoint.

    The rename comes first: a removal that is interrupted must not leave what looks like a corrupted
    checkpoint. What cannot be deleted then is left to `remove_partial`.
    """
    renamed = directory.with_name(f".partial-{directory.name}{REMOVED}")
    _delete(renamed)
    move(directory, renamed)  # synced before its files go: a power failure must not leave a part
    if renamed.is_dir():
        _delete(renamed)
    else:
        renamed.unlink(missing_ok=True)  # another attempt's start may have been faster


def _delete(directory: Path) -> None:
    """Remove a directory as far as possible; of a link, nothing but the link itself."""
    if directory.is_symlink():
        with contextlib.suppress(OSError):
            directory.unlink()
    else:
        shutil.rmtree(directory, ignore_errors=True)
