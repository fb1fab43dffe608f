"""Which checkpoint a run resumes from. All ranks find it together and read it once between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import CheckpointError, UnreadableError
from foundation.retry import WAITS, Outage, Patience
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.distributed.world import World, broadcast_value, raise_on_all_ranks
from pretrain.terminal.text import counted

logger = logging.getLogger(__name__)


def find_resume_point(
    root: Path,
    world: World,
    run_id: str,
    before: int | None = None,
    patience: Patience | None = None,
    nearer: Callable[[int, int | None], marker.Checkpoint | None] | None = None,
    verified: marker.Checkpoint | None = None,
) -> marker.Checkpoint | None:
    """Return the latest valid checkpoint (of a step below `before`); None if the run has none yet.

    The files of the `verified` one, which a rewind in this process has just hashed, are not hashed
    again. `nearer` gets the latest step here and `before`; what it finds after that step is taken
    instead.

    Rank 0 reads the index for all; each rank hashes its share of the files. A checkpoint is refused
    on all ranks if one of them refuses it; it is named, and remembered (`marker.remember`).
    CheckpointError if there are checkpoints and none is valid; where storage fails, only after the
    `patience`.
    """
    outage = Outage(patience or Patience())
    outage.run_waits()
    while True:
        refusals: list[Refusal] = []
        try:
            found = _find(root, world, run_id, before, refusals, nearer, verified)
        except UnreadableError as error:
            problem = refusals[0].reason if refusals else str(error)
            outage.failed(problem, WAITS, remedy="check the disk or file server")
            if broadcast_value(outage.is_over_patience, bool):  # rank 0's clock decides
                _report(refusals, world)
                raise
            with raise_on_all_ranks():
                outage.pause()
        except CheckpointError:
            _report(refusals, world)
            raise
        else:
            outage.ended()
            _report(refusals, world)
            return found


@dataclass(frozen=True)
class Refusal:
    """A checkpoint that is not used, and the step that is."""

    directory: Path
    reason: str
    using: str


def _find(
    root: Path,
    world: World,
    run_id: str,
    before: int | None,
    refusals: list[Refusal],
    nearer: Callable[[int, int | None], marker.Checkpoint | None] | None,
    verified: marker.Checkpoint | None,
) -> marker.Checkpoint | None:
    def verify(directory: Path) -> marker.Checkpoint:
        start = time.monotonic()
        index: dict[str, Any] = {}
        with raise_on_all_ranks():
            if world.is_main:
                index = marker.read_index(directory, run_id).index
        found = marker.Checkpoint(directory, broadcast_value(index, dict[str, Any]))
        if found == verified:  # also its index, with the hashes
            return found
        with raise_on_all_ranks():
            marker.check_share(found, world.rank, world.world_size, is_shown=world.is_main)
        if world.is_main:
            marker.remember(directory, refused="")
            logger.info("resuming from %s, %s", directory, _cost(found, start, world))
        return found

    def refused(directory: Path, reason: str, found: marker.Checkpoint | None) -> None:
        refusals.append(Refusal(directory, reason, marker.step_of(found)))

    steps: list[int] = []
    latest = 0
    with raise_on_all_ranks():
        if world.is_main:
            _require_directory(root)
            files.remove_partial(root)
            steps = files.steps_on_disk(root)
            latest = marker.latest_step(root, before) if nearer is not None else 0
    steps = [step for step in broadcast_value(steps, list[int]) if before is None or step < before]
    if nearer is not None and (found := nearer(broadcast_value(latest, int), before)) is not None:
        return found
    return marker.first_valid(root, steps, verify, refused)


def _require_directory(root: Path) -> None:
    """Raise UnreadableError if a run has lost its directory of checkpoints, as with a mount."""
    if not root.is_dir() and root.with_name("run.json").exists():
        raise UnreadableError(
            f"{root}: missing, although every run has it; bring it back, or make an empty one to "
            "start the run from scratch"
        )


def _report(refusals: Sequence[Refusal], world: World) -> None:
    for each in refusals:
        refuse(each.directory, each.reason, each.using, world)


def refuse(directory: Path, reason: str, using: str, world: World) -> None:
    """Name a checkpoint that is not used, and what is instead; remember it."""
    if world.is_main:
        logger.warning(marker.refusal(reason, using))
        marker.remember(directory, reason)


def _cost(found: marker.Checkpoint, start: float, world: World) -> str:
    ranks = counted(world.world_size, "rank")
    seconds = time.monotonic() - start
    return f"verified in {seconds:.1f} s ({found.num_bytes / 2**20:,.1f} MiB by {ranks})"
