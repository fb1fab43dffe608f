"""Saves of a run, and their restoration at any world size and ZeRO stage.

Each rank writes its own file in a background thread (`save.py`), without collectives; rank 0
publishes all of them (`disk.py`). On resume each rank reads the slices that it needs (`load.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

import torch

from foundation.errors import ConfigError, UserError
from foundation.typed_values import to_tree
from pretrain.checkpoint import retention
from pretrain.checkpoint.disk import Disk
from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.load import (
    load_cursor,
    load_fragments,
    load_memory,
    restore_counters,
    restore_random_state,
)
from pretrain.checkpoint.replicas import non_finite_name, require_equal_replicas, require_finite
from pretrain.checkpoint.save import RankFile, Save, new_index, owned_fragments
from pretrain.checkpoint.storage_retry import ANY_REMEDY, StorageRetry, WriteFailures
from pretrain.checkpoint.tensor_layout import HostBuffer
from pretrain.checkpoint.transfer import RankReports, SaveProblem
from pretrain.checkpoint.verify import steps_that_count
from pretrain.config.phases import restarts_lanes
from pretrain.config.run import RunConfig, accumulation_steps, lanes_of_rank
from pretrain.distributed.collectives import broadcast_value, gather_present, raise_on_all_ranks
from pretrain.distributed.messages import Worker, gather_rows
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine
from pretrain.errors import CheckpointError, StorageError, UnreadableError
from pretrain.model.memory import Memory, MemoryLayout, selected_lanes
from pretrain.state import TrainState

logger = logging.getLogger(__name__)

# Disk space for a rank's part of the index, with the cursors of its lanes.
INDEX_BYTES_PER_RANK = 1 << 16


class Checkpointer:
    """Saves and restores one run. All ranks call `save`, `finish` and `restore` together.

    `disk` names the same directory and attempt on all ranks. Steps that are `held` are not pruned.
    Leaving the context cancels a save in progress, so call `finish` before.

    If storage fails, the save is given up with a warning; when `is_to_try_again` is set, the loop
    saves a later step instead. Once saves have failed for the time of `retry`, every rank raises
    StorageError.
    """

    def __init__(
        self,
        run: RunConfig,
        disk: Disk,
        world: World,
        retry: StorageRetry | None = None,
        held: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        self._run, self._disk, self._world = run, disk, world
        self._memory_layout = MemoryLayout(run.model)
        self._buffer = HostBuffer(world.device)
        self._save: Save | None = None
        self._saves_started = 0
        self._saver = Worker("save")
        # Old checkpoints are removed in a thread of their own: to delete the files of thousands of
        # ranks takes long, and the next save need not wait for it.
        self._remover = Worker("removal")
        self._failures = WriteFailures(retry or StorageRetry())
        self._held = held
        self._published_step = 0  # the last step that all ranks finished saving, or restored

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._save is not None:
            self._save.cancel()
        self._remover.wait()
        self._remover.end()
        self._saver.end()

    def save(
        self,
        engine: Engine,
        state: TrainState,
        obstacle: Callable[[], str] = lambda: "",
        suspected_since: int | None = None,
    ) -> bool:
        """Start a checkpoint of `state.step`; without `checkpoint.asynchronous`, also finish it.

        Finishes the previous save first. Call `wait_for_copy` before the engine's next update. The
        latest checkpoint before step `suspected_since` is kept for a rewind. Returns False if the
        disk is too full, or rank 0's `obstacle` returns why other files must be on disk first.
        Raises on every rank if replicas differ or a value is not finite (NonFiniteError).
        """
        self.finish()
        require_equal_replicas(engine, state)
        rank_file = RankFile.of(owned_fragments(engine), state, self._memory_layout)
        require_finite(engine, state.step, rank_file.tensors)
        if problem := self._problem_ahead(state.step, rank_file, obstacle):
            self._give_up_save(state.step, problem)
            return False
        disk, rank, world_size = self._disk, self._world.rank, self._world.world_size
        more = {"world_size": world_size, "attempt": disk.attempt}
        index = new_index(disk.run_id, to_tree(self._run), engine, state, **more)
        lanes = lanes_of_rank(self._run, rank, world_size)
        cursor = state.cursor.to_tree() if state.cursor else None
        report = {"first_lane": lanes.start, "num_lanes": len(lanes), "cursor": cursor}
        self._saves_started += 1
        reports = RankReports(f"{disk.attempt}/{self._saves_started}", rank, world_size)
        remove_old = partial(self._remove_old, state.step, suspected_since)
        then = partial(self._remover.add, remove_old)
        self._save = Save(disk, rank_file, index, report, reports, self._buffer, then)
        self._saver.add(self._save.run)
        return self._run.checkpoint.asynchronous or self.finish()

    def until_published(self, save: Callable[[], bool]) -> None:
        """Call `save` until its checkpoint is published; pause after each failure."""
        self._failures.run_waits()
        while not (save() and self.finish()):
            with raise_on_all_ranks():  # a stop request on one rank ends the wait of all
                self._failures.pause()

    def wait_for_copy(self) -> None:
        """Wait until the save in progress has copied weights and memories: they may change then."""
        if self._save is not None:
            self._save.wait_for_copy()

    @property
    def has_failed(self) -> bool:
        """Whether the save in progress has failed on this rank; then all ranks call `finish`."""
        return self._save is not None and self._save.problem is not None

    @property
    def is_to_try_again(self) -> bool:
        """Whether a save has failed and it is time for the next try, by this rank's clock."""
        return self._save is None and self._failures.is_due

    @property
    def last_step(self) -> int:
        """The step of the last save, in progress or published; the same on all ranks."""
        return self._published_step if self._save is None else self._save.step

    @property
    def published_step(self) -> int:
        """`last_step` once this rank knows that it is published, else 0. Rank 0 knows it first."""
        is_published = self._save is None or self._save.is_published
        return self.last_step if is_published else 0

    def finish(self) -> bool:
        """Wait for the save in progress; return False if it failed on any rank. A collective."""
        if self._save is None:
            return True
        save, self._save = self._save, None
        problems = gather_present(save.wait(), SaveProblem)
        if not problems:
            self._failures.ended()
            self._published_step = save.step
            return True
        save.cancel()
        # The first problem that retries cannot solve, or else simply the first.
        problem = min(problems, key=lambda problem: problem.is_transient)
        self._give_up_save(save.step, problem)
        return False

    def _give_up_save(self, step: int, problem: SaveProblem) -> None:
        """Discard the save, so that a later one tries again.

        Raises on every rank if no retry can help, or if saves have failed for too long.
        """
        problem = broadcast_value(self._cause(problem), SaveProblem)
        if problem.is_transient:
            text = f"step {step} not saved: {problem.text}"
            self._failures.failed(text, "training continues", problem.remedy)
        # Clocks differ, so rank 0's clock decides. No rank writes any more, because `finish` has
        # waited for all ranks, so the files can be removed. `discard` removes only this attempt's
        # files, because a newer attempt may be saving the same step.
        is_over_limit = broadcast_value(self._failures.is_over_limit, bool)
        if self._world.is_main:
            self._disk.discard(step)
        if is_over_limit or not problem.is_transient:
            text = f"could not save step {step}: {problem.text}; older checkpoints are untouched"
            if problem.remedy:
                text += f", {problem.remedy} and rerun the command to resume from the latest"
            raise (StorageError if problem.is_transient else CheckpointError)(text)

    def _cause(self, problem: SaveProblem) -> SaveProblem:
        """Return why the save failed, on rank 0: the problem, or a newer attempt that caused it.

        A newer attempt removes the unfinished files of this one, which looks like a storage error.
        """
        if self._world.is_main and problem.is_transient:
            try:
                self._disk.may_write()
            except UserError as error:
                return SaveProblem(str(error), is_transient=False, remedy="")
            except OSError:
                pass  # storage fails, so it cannot show whether there is a newer attempt
        return problem

    def restore(self, engine: Engine, checkpoint: Checkpoint) -> TrainState:
        """Load a verified checkpoint into the engine; return the rest of its state.

        Raises UnreadableError on every rank if any can no longer read it or finds NaN or inf in it.
        """
        self.finish()
        with raise_on_all_ranks():
            try:
                load_fragments(engine, checkpoint)
                state = self._restore_state(engine, checkpoint)
            except UserError as error:
                if not checkpoint.is_local:
                    raise
                # A local checkpoint fits only an engine that shards as at the save. If it does not
                # fit, the start tries the shared checkpoint.
                raise UnreadableError(f"{checkpoint.directory}: cannot be used: {error}") from error
            file = RankFile.of(owned_fragments(engine), state, self._memory_layout)
            if name := non_finite_name(engine, file.tensors):
                raise UnreadableError(f"{checkpoint.directory}: has NaN or inf in {name}")
        restore_counters(engine, checkpoint)
        if not checkpoint.is_local:
            self._published_step = checkpoint.step
        return state

    def _problem_ahead(
        self, step: int, rank_file: RankFile, obstacle: Callable[[], str]
    ) -> SaveProblem | None:
        """Prepare the disk; return rank 0's reason not to start the save, or None."""
        own_bytes = torch.tensor(rank_file.layout.file_bytes)
        wanted = int(gather_rows(own_bytes).sum()) + self._world.world_size * INDEX_BYTES_PER_RANK
        problem = None
        if self._world.is_main:
            try:
                if reason := obstacle():
                    problem = SaveProblem(reason, remedy=ANY_REMEDY)
                else:
                    self._disk.prepare(step, wanted)
            except OSError as error:
                problem = SaveProblem.of(error)
            except CheckpointError as error:
                problem = SaveProblem(str(error))
        return broadcast_value(problem, SaveProblem | None)

    def _remove_old(self, published: int, suspected_since: int | None) -> None:
        """Remove checkpoints that are undone or not kept; after an error, the next save retries.

        Checkpoints after step `published` do not count as kept: they may contain a spike that began
        after this save's `suspected_since` was computed.
        """
        kept, root = self._run.checkpoint, self._disk.root
        try:
            self._disk.remove_undone(published)
            valid = [step for step in steps_that_count(root) if step <= published]
            retention.prune(
                root, valid, kept.keep_last, kept.keep_every, suspected_since, self._held()
            )
        except Exception as error:
            logger.warning("old checkpoints stay: %s", error)

    def _restore_state(self, engine: Engine, checkpoint: Checkpoint) -> TrainState:
        lanes = lanes_of_rank(self._run, self._world.rank, self._world.world_size)
        rank, num_ranks = (
            (0, 1) if checkpoint.is_local else (self._world.rank, self._world.world_size)
        )
        if checkpoint.index["world_size"] == num_ranks:
            # The run itself draws no random numbers: dropout is a function of step and lane. So the
            # saved state matters only to code that someone adds. With another number of ranks, such
            # code starts from the seed.
            restore_random_state(checkpoint, rank)
        cursor = None
        if not restarts_lanes(self._run, checkpoint.step):
            cursor = load_cursor(checkpoint).take(lanes)
        memories = self._restore_memories(
            engine, checkpoint, range(len(lanes)) if checkpoint.is_local else lanes
        )
        return TrainState(checkpoint.step, checkpoint.index["tokens_seen"], memories, cursor)

    def _restore_memories(
        self, engine: Engine, checkpoint: Checkpoint, lanes: range
    ) -> list[Memory | None]:
        """Return each slot's memory; None for all if a phase with other lanes starts here."""
        num_slots = accumulation_steps(self._run, self._world.world_size)
        lanes_before = sum(report["num_lanes"] for report in checkpoint.rank_reports)
        lanes_now = len(lanes) if checkpoint.is_local else self._run.data.lanes
        tensors = load_memory(checkpoint, lanes) if lanes_before == lanes_now else None
        if tensors is None:
            return [None] * num_slots
        try:
            memory = self._memory_layout.of_named(tensors, len(lanes))
        except ConfigError as error:
            kinds = [mixer.distribution or mixer.kind for mixer in self._run.model.mixers_used]
            advice = f"restore the versions of {', '.join(kinds)} that the ledger has"
            raise CheckpointError(f"{checkpoint.directory}: {error}; {advice}") from error
        # The run may resume with another precision than it was saved with.
        dtype = next(engine.module.parameters()).dtype
        home = torch.device("cpu") if self._run.engine.offload_memories else self._world.device
        moved, per_slot = self._memory_layout.moved(memory, home, dtype), len(lanes) // num_slots
        slots = (slice(slot * per_slot, (slot + 1) * per_slot) for slot in range(num_slots))
        return [tuple(part.clone() for part in selected_lanes(moved, slot)) for slot in slots]
