"""Which checkpoint a run resumes from. All ranks find it together and read it once between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foundation.errors import CheckpointError, UnreadableError
from foundation.retry import WAITS, Outage, Patience
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.distributed.world import World, broadcast_value, raise_on_all_ranks
from pretrain.terminal.text import counted

logger = logging.getLogger(__name__)
Nearer = Callable[[int, int | None], marker.Checkpoint | None]


def find_resume_point(
    root: Path,
    world: World,
    run_id: str,
    before: int | None = None,
    patience: Patience | None = None,
    nearer: Nearer | None = None,
) -> marker.Checkpoint | None:
    """Return the latest valid checkpoint (of a step below `before`); None if the run has none yet.

    `nearer` gets the latest step here and `before`; what it finds after that step is taken
    instead.

    Rank 0 reads the index for all; each rank hashes its share of the files. A checkpoint is refused
    on all ranks if one of them refuses it; it is named, and remembered (`marker.remember`).
    CheckpointError if there are checkpoints and none is valid; where storage fails, only after the
    `patience`.
    """
    outage = Outage(patience or Patience())
    outage.run_waits()
    while True:
        refused: marker.Refused = []
        try:
            found, refused = _find(root, world, run_id, before, nearer)
            if found is None and refused:
                raise marker.none_valid(root, refused)
        except UnreadableError as error:
            problem = str(refused[0][1]) if refused else str(error)
            outage.failed(problem, WAITS, remedy="check the disk or file server")
            if broadcast_value(outage.is_over_patience, bool):  # rank 0's clock decides
                _report(root, refused, None, world)
                raise
            with raise_on_all_ranks():
                outage.pause()
        except CheckpointError:
            _report(root, refused, None, world)
            raise
        else:
            outage.ended()
            _report(root, refused, found, world)
            return found


def _find(
    root: Path,
    world: World,
    run_id: str,
    before: int | None,
    nearer: Nearer | None,
) -> tuple[marker.Checkpoint | None, marker.Refused]:
    def get(step: int) -> marker.Checkpoint:
        directory, start = files.step_directory(root, step), time.monotonic()
        index: dict[str, Any] = {}
        with raise_on_all_ranks():
            if world.is_main:
                index = marker.read_index(directory, run_id).index
        found = marker.Checkpoint(directory, broadcast_value(index, dict[str, Any]))
        with raise_on_all_ranks():
            marker.check_share(found, world.rank, world.world_size)
        if world.is_main:
            marker.remember(directory, refused="")
            what = "resuming from %s, verified in %.1f s (%s MiB by %s)"
            size, ranks = f"{found.num_bytes / 2**20:,.1f}", counted(world.world_size, "rank")
            logger.info(what, directory, time.monotonic() - start, size, ranks)
        return found

    steps: list[int] = []
    latest = 0
    with raise_on_all_ranks():
        if world.is_main:
            if not root.is_dir() and root.with_name("run.json").exists():  # lost, as with a mount
                raise UnreadableError(
                    f"{root}: missing, although every run has it; bring it back, or make an empty "
                    "one to start the run from scratch"
                )
            files.remove_partial(root)
            steps = files.steps_on_disk(root)
            latest = marker.latest_step(root, before) if nearer is not None else 0
    steps = [step for step in broadcast_value(steps, list[int]) if before is None or step < before]
    if nearer is not None and (found := nearer(broadcast_value(latest, int), before)) is not None:
        return found, []
    return marker.newest_valid(steps, get)


def _report(
    root: Path, refused: marker.Refused, found: marker.Checkpoint | None, world: World
) -> None:
    for step, error in refused:
        refuse(files.step_directory(root, step), str(error), marker.step_of(found), world)


def refuse(directory: Path, reason: str, using: str, world: World) -> None:
    """Name a checkpoint that is not used, and what is instead; remember it."""
    if world.is_main:
        logger.warning(marker.refusal(reason, using))
        marker.remember(directory, reason)
