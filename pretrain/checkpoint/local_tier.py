"""Local checkpoints: each rank's own part on its node's disk, between those of the run directory.

LOCAL/run-3f0c.../rank-00003/step-00000150/     COMPLETE, index.json, rank-00000.safetensors

What a rank writes is a checkpoint of one rank, by the same code and with the same hashes as a
shared one (`marker.py`): every fragment that it holds counts as a whole parameter. So it needs no
other node's disk, and fits only the same rank of the same number of ranks with the same settings.

A step counts if every rank has it whole, from the same start of the run, and that start still
stands in the ledger up to that step (`steps_that_stand`). Otherwise all ranks use the shared
checkpoint. Nothing here ends a run: a disk that fails costs its checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from foundation.errors import CheckpointError, UserError, os_error_text
from foundation.files import private_directory
from foundation.settings import differences, to_tree
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.background_save import (
    HostBuffer,
    RankFile,
    RankReports,
    Save,
    new_index,
)
from pretrain.checkpoint.checkpointer import require_equal_replicas
from pretrain.checkpoint.destinations import Disk
from pretrain.checkpoint.elastic_reader import local_name
from pretrain.checkpoint.pieces import key_of
from pretrain.config.run import RunConfig
from pretrain.distributed.rounds import Worker
from pretrain.distributed.world import World, broadcast_value, gather_values
from pretrain.engines.engine import Engine
from pretrain.model.lane_state import LaneState
from pretrain.state import TrainState

logger = logging.getLogger(__name__)

KEPT = 2  # the latest that all ranks have may be the one before a rank's latest
RUN_FOLDER = re.compile(r"run-[0-9a-f]{12}")
# Settings that change nothing of what a run has learned at a step.
MAY_DIFFER = ("checkpoint", "evaluation", "metrics")


@dataclass(frozen=True)
class Offer:
    """What a rank finds on its disk: attempts by step, and why the latest is of no use, if so."""

    attempts: dict[str, str] = field(default_factory=dict)
    problem: str = ""


class LocalTier:
    """The local checkpoints of one start; without `checkpoint.local` there are none.

    `config` has all phases, as the user wrote it; `shared` is the disk of the other checkpoints;
    `standing` is what `steps_that_stand` found. All ranks call `find` and `save` together. A
    context manager: leaving it cancels a save in progress.
    """

    def __init__(
        self, config: RunConfig, shared: Disk, world: World, standing: Mapping[str, int]
    ) -> None:
        self._kept, self._world = config.checkpoint, world
        self._lane_state = LaneState(config.model)
        tree = json.loads(json.dumps(to_tree(config)))
        self._config = {name: part for name, part in tree.items() if name not in MAY_DIFFER}
        self._standing = standing
        self._buffer = HostBuffer(world.device)
        self._save: Save | None = None
        self._saver = Worker("local save")
        self._has_failed = False
        self.shared_step = 0  # the latest in the run directory, as `find` was told
        self._disk: Disk | None = None  # None: none is used, on any rank
        if config.checkpoint.local is not None:
            folder = config.checkpoint.local / f"run-{shared.run_id}"
            own = Disk(folder / f"rank-{world.rank:05d}", shared.attempt, shared.run_id)
            self._disk = self._opened(own)

    def __enter__(self) -> LocalTier:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._save is not None:
            self._save.cancel()
        self._saver.end()

    def find(self, shared_step: int, before: int | None = None) -> marker.Checkpoint | None:
        """Return this rank's part of the latest step after `shared_step` that all ranks have.

        None, on all ranks, if there is none; one line says why if any rank has some. Later ones
        are removed: the run is about to make those steps again.
        """
        self.shared_step = shared_step
        if self._kept.local is None:
            return None
        offers = gather_values(self._offer(shared_step, before), Offer)
        common = set.intersection(*(set(each.attempts.items()) for each in offers))
        found, refused = marker.newest_valid(sorted(int(step) for step, _ in common), self._get)
        if self._world.is_main:
            for step, error in refused:
                logger.warning("local checkpoints of step %d are not used: %s", step, error)
            if found is None and any(each.attempts or each.problem for each in offers):
                used = f"step {shared_step}, the shared one" if shared_step else "none"
                problems = [
                    "" if each.attempts else each.problem or "has none on its node"
                    for each in offers
                ]
                why = str(refused[0][1]) if refused else _first(problems)
                why = why or "no step is there on all ranks"
                logger.warning("local checkpoints are not used: %s; using %s", why, used)
        if (disk := self._disk) is not None:
            last = found.step if found else shared_step
            with contextlib.suppress(OSError, CheckpointError):
                for step in filter(lambda step: step > last, reversed(disk.steps())):
                    disk.remove(step)
        return found

    def _get(self, step: int) -> marker.Checkpoint:
        """Return this rank's part of the step, if all ranks verify theirs. A collective."""
        assert self._disk is not None
        start, problem, found = time.monotonic(), "", None
        try:
            found = self._disk.get(step)
        except CheckpointError as error:
            problem = str(error)
        problems = gather_values(problem, str)
        if found is None or any(problems):
            raise CheckpointError(_first(problems))
        if self._world.is_main:
            what = "resuming from the local checkpoints of step %d in %s, verified in %.1f s"
            logger.info(what, step, self._disk.root.parent, time.monotonic() - start)
        return replace(found, is_local=True)

    def is_due(self, step: int) -> bool:
        """Whether `step` is one to save here."""
        return self._kept.local is not None and step % self._kept.local_interval == 0

    def save(self, engine: Engine, state: TrainState, obstacle: Callable[[], str]) -> None:
        """Start to save `state.step`, once the save before is written.

        Not if rank 0's `obstacle` says that something else must be on disk first. Raises on every
        rank if replicas differ. Call `wait_for_copy` before the engine's next update.
        """
        self._finish()
        require_equal_replicas(engine, state)
        disk = self._disk
        if broadcast_value(obstacle() if self._world.is_main else "", str) or disk is None:
            return
        pieces = {
            key_of(local_name(fragment), 0, kind): [value]
            for fragment in engine.fragments()
            for kind, value in fragment.values.items()
        }
        rank_file = RankFile.of(pieces, state, self._lane_state)
        rank, world_size = self._world.rank, self._world.world_size
        local = {"attempt": disk.attempt, "rank": rank, "world_size": world_size}
        index = new_index(disk.run_id, self._config, engine, state, local=local)
        try:
            disk.prepare(state.step, rank_file.layout.file_bytes)
        except (OSError, UserError) as error:
            self._failed(state.step, _text(error))
            return
        assert state.cursor is not None
        lanes, cursor = len(state.cursor.lanes), state.cursor.to_tree()
        report = {"first_lane": 0, "num_lanes": lanes, "cursor": cursor}
        self._save = Save(
            disk,
            rank_file,
            index,
            report,
            RankReports("", rank=0, num_ranks=1),
            self._buffer,
            then=lambda: files.prune(disk.root, disk.steps(), KEPT),
        )
        self._saver.add(self._save.run)
        if not self._kept.asynchronous:
            self._finish()

    def wait_for_copy(self) -> None:
        """Return when engine and memories may change."""
        if self._save is not None:
            self._save.wait_for_copy()

    def remove(self) -> None:
        """Remove this rank's checkpoints, of a run that has finished."""
        if self._disk is not None:
            self._finish()
            shutil.rmtree(self._disk.root, ignore_errors=True)
            with contextlib.suppress(OSError):  # other ranks' may still be there
                self._disk.root.parent.rmdir()

    def _opened(self, disk: Disk) -> Disk | None:
        """Make this rank's folder on all ranks, or use none on any."""
        folder, problem = disk.root.parent, ""
        try:
            if not RUN_FOLDER.fullmatch(folder.name):
                raise UserError(f"found the run's id {disk.run_id!r}, expected 12 hex digits")
            private_directory(folder)
            private_directory(disk.root)
            files.remove_partial(disk.root)
        except (OSError, UserError) as error:
            problem = _text(error)
        problems = gather_values(problem, str)
        if any(problems):
            if self._world.is_main:
                logger.warning("no local checkpoints: %s", _first(problems))
            return None
        return disk

    def _offer(self, shared_step: int, before: int | None) -> Offer:
        attempts, problem = {}, ""
        try:
            steps = self._disk.steps() if self._disk else []
        except CheckpointError as error:
            return Offer(problem=str(error))
        for step in steps:
            if shared_step < step < (before or sys.maxsize):
                try:
                    attempts[str(step)] = self._attempt_that_saved(step)
                except CheckpointError as error:
                    problem = str(error)
        return Offer(attempts, problem)

    def _attempt_that_saved(self, step: int) -> str:
        """Return it; CheckpointError if this rank cannot resume from the step."""
        assert self._disk is not None
        index = marker.read_index(files.step_directory(self._disk.root, step)).index
        match index.get("local"):
            case {"attempt": str(attempt), "rank": int(rank), "world_size": int(world_size)}:
                pass
            case _:
                raise CheckpointError("found a checkpoint that is no local one")
        if (rank, world_size) != (self._world.rank, self._world.world_size):
            raise CheckpointError(
                f"step {step} was saved by rank {rank} of {world_size}, now it is rank "
                f"{self._world.rank} of {self._world.world_size}"
            )
        for name, (old, new) in differences(index["config"], self._config).items():
            raise CheckpointError(
                f"step {step} was saved with other settings ({name}: {old} -> {new})"
            )
        if step > self._standing.get(attempt, -1):
            raise CheckpointError(f"step {step} is from before the run went back")
        return attempt

    def _finish(self) -> None:
        if self._save is None:
            return
        save, self._save = self._save, None
        if problem := save.wait():
            self._failed(save.step, problem.text)
        else:
            self._has_failed = False

    def _failed(self, step: int, problem: str) -> None:
        if self._disk is not None:
            self._disk.discard(step)
        if not self._has_failed:
            logger.warning("no local checkpoint of step %d: %s; training continues", step, problem)
        self._has_failed = True


def _first(problems: list[str]) -> str:
    """The first rank's problem, with its number; '' if there is none."""
    found = ((rank, problem) for rank, problem in enumerate(problems) if problem)
    return next((f"rank {rank}: {problem}" for rank, problem in found), "")


def _text(error: Exception) -> str:
    return os_error_text(error) if isinstance(error, OSError) else str(error)
