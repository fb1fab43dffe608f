"""Copies beside the run directory: local checkpoints on nodes' disks, and the mirror.

LOCAL/run-3f0c.../rank-00003/step-00000150/     COMPLETE, index.json, rank-00000.safetensors

What a rank writes to its node's disk is a checkpoint of one rank, by the same code and with the
same hashes as a shared one (`marker.py`): every fragment that it holds counts as a whole parameter.
So it needs no other node's disk, and fits only the same rank of the same number of ranks with the
same settings.

A step counts if every rank has it whole, from the same start of the run, and that start still
stands in the ledger up to that step (`History`). Otherwise all ranks use the shared
checkpoint. Nothing here ends a run: a disk that fails costs its checkpoints.

An upload to the mirror is a `Transfer` as a save is: each rank puts its share of a published
checkpoint into the store, in a thread, and reports; then rank 0 uploads what makes it count. No
step waits for a store. If any rank fails, the upload has failed; after a pause the latest
checkpoint is uploaded, of which the store may have some files already.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from foundation.errors import CheckpointError, UserError, os_error_text
from foundation.ownership import private_directory
from foundation.records import json_text
from foundation.retry import Outage, Patience
from foundation.settings import differences, to_tree
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.background_save import (
    HostBuffer,
    RankFile,
    RankReports,
    Report,
    Save,
    Transfer,
    new_index,
)
from pretrain.checkpoint.destinations import Disk, ObjectStore, Publication, StoredCheckpoint
from pretrain.checkpoint.elastic_reader import local_name
from pretrain.checkpoint.facts import Destination, History
from pretrain.checkpoint.marker import key_of, read_index
from pretrain.checkpoint.replicas import require_equal_replicas, require_finite
from pretrain.config.run import RunConfig
from pretrain.distributed.world import Worker, World, broadcast_value, gather_values, on_any_rank
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
    """What is on a rank's disk: by step, which attempt saved it, or why it is of no use."""

    attempts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def problem_after(self, step: int) -> str:
        """Why none of the steps after this one is of use; '' if one of them is."""
        if any(int(each) > step for each in self.attempts):
            return ""
        later = [problem for each, problem in self.problems.items() if int(each) > step]
        return later[-1] if later else "has none on its node"


class LocalTier:
    """The local checkpoints of one start; without `checkpoint.local` there are none.

    `config` has all phases, as the user wrote it; `shared` is the disk of the other checkpoints;
    `history` is the run's. All ranks call `offered`, `get` and `save` together. A context manager:
    leaving it cancels a save in progress.
    """

    def __init__(self, config: RunConfig, shared: Disk, world: World, history: History) -> None:
        self._kept, self._world = config.checkpoint, world
        self._lane_state = LaneState(config.model)
        tree = json.loads(json_text(to_tree(config)))
        self._config = {name: part for name, part in tree.items() if name not in MAY_DIFFER}
        self._history = history
        self._offers: list[Offer] = []
        self._buffer = HostBuffer(world.device)
        self._save: Save | None = None
        self._saver = Worker("local save")
        self._has_failed = False
        self._disk: Disk | None = None  # None: none is used, on any rank
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

    def __enter__(self) -> LocalTier:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._save is not None:
            self._save.cancel()
        self._saver.end()

    def offered(self, before: int | None = None) -> list[int]:
        """Return the steps that every rank has from the same start, unread, oldest first."""
        if self._kept.local is None:
            return []
        self._offers = gather_values(self._offer(before), Offer)
        common = set.intersection(*(set(each.attempts.items()) for each in self._offers))
        return sorted(int(step) for step, _ in common)

    def tell_unused(self, used: int, known: int) -> None:
        """Say on rank 0 why no step after the `used` one is, if the run has saved one here.

        `known` is the latest that the ledger has.
        """
        disks = [each.attempts.keys() | each.problems.keys() for each in self._offers]
        latest = max([known, *(int(step) for steps in disks for step in steps)])
        if self._kept.local is not None and latest > used and self._world.is_main:
            why = _first([each.problem_after(used) for each in self._offers])
            why = why or "no later step is whole on all ranks"
            using = f"step {used}, the shared one" if used else "none"
            logger.warning("local checkpoints are not used: %s; using %s", why, using)

    def get(self, step: int) -> marker.Checkpoint:
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
        rank if replicas differ or a value is not finite. Call `wait_for_copy` before the engine's
        next update.
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
        require_finite(engine, state.step, rank_file.tensors)
        rank, world_size = self._world.rank, self._world.world_size
        local = {"attempt": disk.attempt, "rank": rank, "world_size": world_size}
        index = new_index(disk.run_id, self._config, engine, state, local=local)
        try:
            disk.prepare(state.step, rank_file.layout.file_bytes)
        except (OSError, UserError) as error:
            self._failed(state.step, os_error_text(error))
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
            then=partial(_prune, disk, state.step),
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
            problem = os_error_text(error)
        problems = gather_values(problem, str)
        if any(problems):
            if self._world.is_main:
                logger.warning("no local checkpoints: %s", _first(problems))
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
        is_known = attempt in self._history.standing
        if not is_known or not self._history.stands(step, attempt):
            raise CheckpointError(f"step {step} is {marker.UNDONE}")
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
    files.prune(disk.root, disk.steps(), KEPT)


def _first(problems: list[str]) -> str:
    """The first rank's problem, with its number; '' if there is none."""
    found = ((rank, problem) for rank, problem in enumerate(problems) if problem)
    return next((f"rank {rank}: {problem}" for rank, problem in found), "")


WAIT_SECONDS = 60.0  # of a run that ends or stops, for its last upload
POLL_SECONDS = 0.1


def location(run: RunConfig) -> str:
    """The URL of the run's mirror; '' if it has none."""
    base = run.checkpoint.mirror.rstrip("/")
    return f"{base}/{run.name}" if base else ""


class Upload(Transfer):
    """A rank's part of uploading the checkpoint in `directory`."""

    def __init__(
        self, directory: Path, reports: RankReports, store: ObjectStore, publication: Publication
    ) -> None:
        super().__init__(int(directory.name.removeprefix("step-")), reports)
        self._directory, self._store, self._publication = directory, store, publication
        self.started = time.monotonic()

    def _put(self) -> tuple[Report, dict[str, object]]:
        self._publication.read()  # another run's folder gets no files
        contents = sorted(read_index(self._directory).files.items())
        folder = StoredCheckpoint.of(self._directory).folder
        for name, content in contents[self._reports.rank :: self._reports.num_ranks]:
            self._store.put(f"{folder}/{name}", self._directory / name, content, self.check)
        return {}, {}

    def _publish(self, reports: list[Report]) -> None:
        self._publication.publish(self._directory, self.check)


class Mirror:
    """Uploads checkpoints of one start of a run. All ranks call `agree` and `finish` together.

    They are those of `disk`, up to `saved_step`, which a start from the nodes' disks is after. The
    store has `uploaded_step`, or nothing (0), as the run resumes from `resumed_step`; `history` is
    as in `Publication`. `note` is told, on rank 0, the seconds that the upload of a step took, or
    why the step is not in the store. A context manager: leaving it cancels an upload in progress,
    which the next start continues. Nothing here raises what a store does.
    """

    def __init__(
        self,
        config: RunConfig,
        disk: Disk,
        world: World,
        resumed_step: int,
        uploaded_step: int,
        note: Callable[[int, float | str], None],
        history: History | None = None,
        saved_step: int | None = None,
    ) -> None:
        self.url, self._settings = location(config), config.checkpoint
        self._disk, self._world, self._note_step = disk, world, note
        self._stored_step = uploaded_step
        self._last_step = resumed_step if saved_step is None else saved_step
        self._upload: Upload | None = None  # on rank 0: that is in progress
        self._uploads = 0  # that were started
        self._failure = ""  # of the last upload
        if self.url:
            self._scratch = tempfile.TemporaryDirectory(
                prefix="xl-pretrain-mirror-", ignore_cleanup_errors=True
            )
            self._store = ObjectStore(self.url, Path(self._scratch.name))
            kept = self._settings
            self._publication = Publication(self._store, disk, resumed_step, kept, history)
            self._outage, self._worker = Outage(Patience(math.inf)), Worker("mirror")

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.url:
            if self._upload is not None:
                self._upload.stop()  # without waiting: a store that is silent would delay the run
            self._worker.end()
            self._scratch.cleanup()

    def held(self) -> Collection[int]:
        """The step whose files on disk are needed (rank 0)."""
        return () if self._upload is None else (self._upload.step,)

    def is_due(self, published_step: int) -> bool:
        """Whether the checkpoint of this step is to be uploaded now, which rank 0 decides.

        `published_step` is 0 where the rank does not know of a published one.
        """
        if not self._lacks(published_step) or self._upload is not None:
            return False
        return not self._failure or self._outage.is_due

    def _lacks(self, step: int) -> bool:
        """Whether the store has another step than this one, as far as rank 0 knows."""
        return bool(self.url) and self._world.is_main and step not in (0, self._stored_step)

    def agree(self, is_due: bool, last_step: int) -> None:
        """Upload the last save, that of `last_step`, if rank 0 has found that it `is_due`."""
        if not self.url:
            return
        self._last_step = last_step
        if self._world.is_main:
            self._note()
        if not is_due:
            return
        if self._upload is not None:
            self._upload.stop()  # rank 0 knows of another rank that failed
        self._uploads += 1
        name = f"{self._disk.attempt}/upload/{self._uploads}"
        self._upload = Upload(
            files.step_directory(self._disk.root, last_step),
            RankReports(name, self._world.rank, self._world.world_size),
            self._store,
            self._publication,
        )
        self._worker.add(self._upload.run)  # after the one before: two would write the same files

    def _note(self) -> None:
        """Note what has become of the upload, and the first of failures in a row."""
        if self._upload is None or not self._upload.is_ended:
            return
        upload, self._upload = self._upload, None
        if upload.is_published:
            self._note_step(upload.step, round(time.monotonic() - upload.started, 1))
            self._stored_step, self._failure = upload.step, ""
            self._outage.ended()
        elif upload.problem is not None:
            self._outage.failed(upload.problem.text, "training continues")
            if not self._failure:
                self._note_step(upload.step, upload.problem.text)
            self._failure = upload.problem.text

    def finish(
        self,
        while_waiting: Callable[[], None] = lambda: None,
        stop_requests: Callable[[], int] = lambda: 0,
    ) -> None:
        """Return when the last checkpoint, which is published, is in the store, or time is over.

        A request to stop ends the wait.
        """
        if not self.url:
            return
        step = self._last_step
        deadline = time.monotonic() + WAIT_SECONDS
        before, is_over = stop_requests(), False
        while True:
            own = [self._lacks(step), self.is_due(step), is_over]
            is_lacking, is_due, is_over = on_any_rank(own)
            self.agree(is_due, step)
            if not is_lacking:
                return
            if is_over:
                break
            while_waiting()
            time.sleep(POLL_SECONDS)
            is_over = time.monotonic() > deadline or stop_requests() > before
        if self._world.is_main:
            failure = f" ({self._failure})" if self._failure else ""
            reason = f"not uploaded when the run ended{failure}"
            self._note_step(step, reason)
            what = "the checkpoint of step %d is not in %s: %s; it is on disk"
            logger.warning(what, step, self.url, reason)
