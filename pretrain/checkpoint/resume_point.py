"""Which checkpoint a run resumes from. All ranks find it together and read it once between them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.distributed.world import World, broadcast_value, raise_on_all_ranks

logger = logging.getLogger(__name__)


def find_resume_point(
    root: Path, world: World, run_id: str, before: int | None = None
) -> marker.Checkpoint | None:
    """Return the latest valid checkpoint (of a step below `before`); None if the run has none yet.

    Each rank hashes its share of the files. A checkpoint is refused on all ranks if one of them
    refuses it; it is named, and remembered (`marker.remember`). CheckpointError if there are
    checkpoints and none is valid.
    """

    def verify(directory: Path) -> marker.Checkpoint:
        start = time.monotonic()
        found = None
        with raise_on_all_ranks():
            found = marker.verify(directory, run_id, world.rank, world.world_size)
        assert found is not None
        if world.is_main:
            marker.remember(directory, refused="")
            logger.info("resuming from %s, %s", directory, _cost(found, start, world))
        return found

    def refused(directory: Path, reason: str) -> None:
        if world.is_main:
            logger.warning(marker.refusal(reason))
            marker.remember(directory, reason)

    steps: list[int] = []
    with raise_on_all_ranks():
        if world.is_main:
            files.remove_partial(root)
            steps = files.steps_on_disk(root)
    steps = [step for step in broadcast_value(steps, list[int]) if before is None or step < before]
    return marker.first_valid(root, steps, verify, refused)


def _cost(found: marker.Checkpoint, start: float, world: World) -> str:
    ranks = f"{world.world_size} rank{'' if world.world_size == 1 else 's'}"
    seconds = time.monotonic() - start
    return f"verified in {seconds:.1f} s ({found.num_bytes / 2**20:,.1f} MiB by {ranks})"
