"""Local checkpoints: each rank's own part of a step, on its node's disk.

LOCAL/run-3f0c.../rank-00003/step-00000150/     COMPLETE, index.json, rank-00000.safetensors

Each is written by the same code as a shared checkpoint of one rank: every fragment that the rank
holds is stored as if it were a whole parameter. So loading needs no other node's disk, and only the
same rank of the same number of ranks with the same settings can load it.

A step can be resumed from if every rank has it whole, saved by the same attempt, and no later start
has undone it (`AttemptHistory`). Otherwise all ranks use the shared checkpoint. If a disk fails,
its local checkpoints are lost, and the run continues.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from foundation.errors import UserError, os_error_text
from foundation.ownership import private_directory
from foundation.settings import differences
from foundation.typed_values import json_text, to_tree
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import retention
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.facts import AttemptHistory, Destination
from pretrain.checkpoint.index import Checkpoint, read_index
from pretrain.checkpoint.load import local_name
from pretrain.checkpoint.pieces import piece_key
from pretrain.checkpoint.replicas import require_equal_replicas, require_finite
from pretrain.checkpoint.save import RankFile, Save, new_index
from pretrain.checkpoint.tensor_layout import HostBuffer
from pretrain.checkpoint.transfer import RankReports
from pretrain.checkpoint.verify import UNDONE
from pretrain.config.run import OF_UPDATES, RunConfig
from pretrain.distributed.collectives import broadcast_value, gather_values
from pretrain.distributed.messages import Worker
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine
from pretrain.errors import CheckpointError
from pretrain.model.memory import MemoryLayout
from pretrain.state import TrainState

logger = logging.getLogger(__name__)

# Steps kept. Ranks finish a save at different times, so the latest step that all ranks have may be
# only the second latest of one rank.
KEPT = 2
RUN_FOLDER = re.compile(r"run-[0-9a-f]{12}")
# Settings that may differ from the checkpoint's. They do not affect the state at the resumed step:
# changes of updates hold only from that step on, and a change of the optimizer was refused before.
MAY_DIFFER = ("checkpoint", "evaluation", "metrics", *(name.rstrip(".") for name in OF_UPDATES))


@dataclass(frozen=True)
class Offer:
    """The checkpoints on a rank's disk: step -> the attempt that saved it, or why it is not usable.

    Steps are strings because JSON has no other keys.
    """

    attempts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def problem_after(self, step: int) -> str:
        """Return why the rank can resume from no later step; '' if it can."""
        if any(int(later) > step for later in self.attempts):
            return ""
        later = [problem for number, problem in self.problems.items() if int(number) > step]
        return later[-1] if later else "has none on its node"


class LocalCheckpoints:
    """The local checkpoints of one start; empty without `checkpoint.local`.

    `config` has all phases, as the user wrote it; `shared` is the disk of the shared checkpoints.
    All ranks call `offered`, `get` and `save` together. Leaving the context cancels a save in
    progress.
    """

    def __init__(
        self, config: RunConfig, shared: Disk, world: World, history: AttemptHistory
    ) -> None:
        self._settings, self._world = config.checkpoint, world
        self._memory_layout = MemoryLayout(config.model)
        tree = json.loads(json_text(to_tree(config)))
        self._config = {name: part for name, part in tree.items() if name not in MAY_DIFFER}
        self._history = history
        self._offers: list[Offer] = []
        self._buffer = HostBuffer(world.device)
        self._save: Save | None = None
        self._saver = Worker("local save")
        self._has_failed = False
        self._disk: Disk | None = None  # None on all ranks: there are no local checkpoints
        if config.checkpoint.local is not None:
            folder = config.checkpoint.local / f"run-{shared.run_id}"
            own = Disk(
                folder / f"rank-{world.rank:05d}",
                shared.attempt,
                shared.run_id,
                relies_on=shared.relies_on if world.is_main else None,
                tell=shared.tell if world.is_main else lambda step, destination: None,
                destination=Destination.NODES,
            )
            self._disk = self._opened(own)

    def __enter__(self) -> LocalCheckpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._save is not None:
            self._save.cancel()
        self._saver.end()

    def offered(self, before: int | None = None) -> list[int]:
        """Return the steps that every rank has from the same attempt, oldest first.

        Only their indexes are read so far.
        """
        if self._settings.local is None:
            return []
        self._offers = gather_values(self._offer(before), Offer)
        common = set.intersection(*(set(offer.attempts.items()) for offer in self._offers))
        return sorted(int(step) for step, _ in common)

    def log_unused(self, used: int, known: int) -> None:
        """Log why no local checkpoint after the `used` step is resumed from, if there was one.

        `known` is the latest local step in the ledger.
        """
        disks = [offer.attempts.keys() | offer.problems.keys() for offer in self._offers]
        latest = max([known, *(int(step) for steps in disks for step in steps)])
        if self._settings.local is not None and latest > used and self._world.is_main:
            why = _first_problem([offer.problem_after(used) for offer in self._offers])
            why = why or "no later step is whole on all ranks"
            using = f"step {used}, the shared one" if used else "none"
            logger.warning("local checkpoints are not used: %s; using %s", why, using)

    def get(self, step: int) -> Checkpoint:
        """Return this rank's part of the step if all ranks' parts are valid. A collective."""
        assert self._disk is not None
        start, problem, checkpoint = time.monotonic(), "", None
        try:
            checkpoint = self._disk.get(step)
        except CheckpointError as error:
            problem = str(error)
        problems = gather_values(problem, str)
        if checkpoint is None or any(problems):
            raise CheckpointError(_first_problem(problems))
        if self._world.is_main:
            logger.info(
                "resuming from the local checkpoints of step %d in %s, verified in %.1f s",
                step, self._disk.root.parent, time.monotonic() - start,
            )  # fmt: skip
        return replace(checkpoint, is_local=True)

    def is_due(self, step: int) -> bool:
        """Return whether a local checkpoint of `step` is due."""
        return self._settings.local is not None and step % self._settings.local_interval == 0

    def save(self, engine: Engine, state: TrainState, obstacle: Callable[[], str]) -> None:
        """Finish the previous save and start one of `state.step`.

        Does nothing if rank 0's `obstacle` returns why other files must be on disk first. Raises on
        every rank if replicas differ or a value is not finite. Call `wait_for_copy` before the
        engine's next update.
        """
        self._finish()
        require_equal_replicas(engine, state)
        disk = self._disk
        if broadcast_value(obstacle() if self._world.is_main else "", str) or disk is None:
            return
        pieces = {
            piece_key(local_name(fragment), 0, kind): [value]
            for fragment in engine.fragments()
            for kind, value in fragment.values.items()
        }
        rank_file = RankFile.of(pieces, state, self._memory_layout)
        require_finite(engine, state.step, rank_file.tensors)
        local = {
            "attempt": disk.attempt, "rank": self._world.rank, "world_size": self._world.world_size
        }  # fmt: skip
        index = new_index(disk.run_id, self._config, engine, state, local=local)
        try:
            disk.prepare(state.step, rank_file.layout.file_bytes)
        except (OSError, UserError) as error:
            self._failed(state.step, os_error_text(error))
            return
        assert state.cursor is not None
        lanes, cursor = len(state.cursor.lanes), state.cursor.to_tree()
        report = {"first_lane": 0, "num_lanes": lanes, "cursor": cursor}
        # With one rank in `reports`, this rank publishes its part without waiting for others.
        reports, then = RankReports("", rank=0, num_ranks=1), partial(_prune, disk, state.step)
        self._save = Save(disk, rank_file, index, report, reports, self._buffer, then)
        self._saver.add(self._save.run)
        if not self._settings.asynchronous:
            self._finish()

    def wait_for_copy(self) -> None:
        """Wait until the save in progress has copied weights and memories: they may change then."""
        if self._save is not None:
            self._save.wait_for_copy()

    def remove(self) -> None:
        """Remove this rank's checkpoints once the run has finished."""
        if self._disk is not None:
            self._finish()
            shutil.rmtree(self._disk.root, ignore_errors=True)
            with contextlib.suppress(OSError):  # other ranks' folders may still be there
                self._disk.root.parent.rmdir()

    def _opened(self, disk: Disk) -> Disk | None:
        """Make every rank's folder; return None on all ranks if one cannot make it."""
        folder, problem = disk.root.parent, ""
        try:
            if not RUN_FOLDER.fullmatch(folder.name):
                raise UserError(f"found the run's id {disk.run_id!r}, expected 12 hex digits")
            private_directory(folder)
            private_directory(disk.root)
            retention.remove_partial(disk.root)
        except (OSError, UserError) as error:
            problem = os_error_text(error)
        problems = gather_values(problem, str)
        if any(problems):
            if self._world.is_main:
                logger.warning("no local checkpoints: %s", _first_problem(problems))
            return None
        return disk

    def _offer(self, before: int | None) -> Offer:
        attempts, problems = {}, {}
        try:
            steps = self._disk.steps() if self._disk else []
        except CheckpointError as error:
            return Offer(problems={str(sys.maxsize): str(error)})
        for step in steps:
            if step < (before or sys.maxsize):
                try:
                    attempts[str(step)] = self._attempt_that_saved(step)
                except CheckpointError as error:
                    problems[str(step)] = str(error)
        return Offer(attempts, problems)

    def _attempt_that_saved(self, step: int) -> str:
        """Return the attempt that saved a step; CheckpointError if the rank cannot use it."""
        assert self._disk is not None
        index = read_index(files.step_directory(self._disk.root, step)).index
        match index.get("local"):
            case {"attempt": str(attempt), "rank": int(rank), "world_size": int(world_size)}:
                pass
            case _:
                raise CheckpointError(f"step {step} was not saved as a local checkpoint")
        if (rank, world_size) != (self._world.rank, self._world.world_size):
            raise CheckpointError(
                f"step {step} was saved by rank {rank} of {world_size}, now it is rank "
                f"{self._world.rank} of {self._world.world_size}"
            )
        for name, (old, new) in differences(index["config"], self._config).items():
            raise CheckpointError(
                f"step {step} was saved with other settings ({name}: {old} -> {new})"
            )
        is_known = attempt in self._history.standing
        if not is_known or not self._history.stands(step, attempt):
            raise CheckpointError(f"step {step} is {UNDONE}")
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


def _prune(disk: Disk, published: int) -> None:
    disk.remove_undone(published)
    retention.prune(disk.root, disk.steps(), KEPT)


def _first_problem(problems: list[str]) -> str:
    """Return the first problem with its rank; '' without problems."""
    named = (f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
    return next(named, "")
