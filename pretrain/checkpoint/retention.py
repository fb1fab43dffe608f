"""Retention: which checkpoints of a run directory are kept, and the removal of the others."""

import contextlib
import logging
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from foundation.files import fsync_directory, move
from foundation.locks import NoFileLocksError, try_lock
from pretrain.checkpoint.directory import MARKER, REMOVED, step_directory, steps_on_disk

logger = logging.getLogger(__name__)


def steps_to_prune(
    steps: list[int],
    valid: Sequence[int],
    keep_last: int,
    keep_every: int,
    held: Collection[int] = (),
    suspected_since: int | None = None,
) -> list[int]:
    """Return the steps before the last `keep_last` of `valid`, but not `held` ones.

    Nor multiples of `keep_every`. `steps` and `valid` are sorted, oldest first. Invalid steps do
    not count as kept, and are returned like others. While losses since step `suspected_since` may
    become a spike, the latest valid step before it stays: the run would rewind to it.
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

    Steps that are `held` stay, such as one that is being uploaded, and steps that a command reads.
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
        except OSError as error:  # as in another user's directory: the save must not fail for it
            logger.warning("%s cannot be removed: %s", directory, error.strerror)
            return False
    return True


def discard_from(root: Path, step: int) -> None:
    """Remove the checkpoints of `step` and all later ones, which a rewind makes invalid.

    A power failure does not bring them back.
    """
    # Latest first: if this is interrupted, no checkpoint is left that is later than a removed one.
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

    The rename comes first: rank 0 of an older attempt may be about to publish the directory. That
    rank then publishes all of it or finds nothing, but never publishes a part.
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
