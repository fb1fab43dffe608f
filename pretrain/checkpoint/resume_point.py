"""What a start resumes from: all ranks look at the run directory, the nodes' disks and the stores.

Rank 0 lists what is there and asks `choose` (`facts.py`); all ranks verify its choice together,
each its share of the files. If any of them refuses it, rank 0 notes why and asks again. What only a
store has is first brought into the run directory, so there is one way to resume.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.corpora.fetch import NotFetchedError
from data_pipeline.corpora.stores import RetryPolicy
from foundation.errors import (
    CheckpointError,
    OtherVersionError,
    UndoneError,
    UnreadableError,
    UserError,
    os_error_text,
)
from foundation.retry import WAITS, Outage, Patience, StorageError
from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.destinations import SCRATCH, MirrorIndex, ObjectStore
from pretrain.checkpoint.facts import (
    Candidate,
    Destination,
    Fact,
    Past,
    Refusal,
    choose,
    newest,
)
from pretrain.checkpoint.local_tier import LocalTier
from pretrain.distributed.world import World, broadcast_value, raise_on_all_ranks
from pretrain.terminal.text import counted

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
# A store is asked at every start, and one that is away must not delay one for minutes.
QUICK = RetryPolicy(attempts=2, timeout=5.0, bytes_per_second=4e6)
NOTHING = Past()


def find_resume_point(
    root: Path,
    world: World,
    run_id: str,
    before: int | None = None,
    patience: Patience | None = None,
    past: Past = NOTHING,
    local: LocalTier | None = None,
    failed: Collection[Candidate] = (),
) -> marker.Checkpoint | None:
    """Return the latest whole checkpoint (of a step below `before`); None to start from scratch.

    Rank 0 reads the index for all; each rank hashes its share of the files. A checkpoint is refused
    on all ranks if one of them refuses it; it is named, and remembered (`marker.remember`). Those
    that have `failed` a moment ago are not tried again.
    CheckpointError, on all ranks, where `choose` refuses; where storage fails, only after the
    `patience`.
    """
    patience = patience or Patience()
    outage = Outage(patience)
    outage.run_waits()
    while True:
        look = _Look(root, world, run_id, before, patience, past, local)
        try:
            found = look.find(failed)
        except UnreadableError as error:
            outage.failed(look.first_problem or str(error), WAITS, "check the disk or file server")
            if broadcast_value(outage.is_over_patience, bool):  # rank 0's clock decides
                look.report()
                raise
            with raise_on_all_ranks():
                outage.pause()
        except CheckpointError:
            look.report()
            raise
        else:
            outage.ended()
            look.report(found)
            look.settle(found)
            return found


@dataclass(frozen=True)
class _Choice:
    """What rank 0 has chosen, as it tells the others."""

    candidate: Candidate | None = None
    refusal: str = ""
    may_pass: bool = False


class _Look:
    """One look at all destinations. What it lists is on rank 0 alone."""

    def __init__(
        self,
        root: Path,
        world: World,
        run_id: str,
        before: int | None,
        patience: Patience,
        past: Past,
        local: LocalTier | None,
    ) -> None:
        self._root, self._world, self._run_id, self._before = root, world, run_id, before
        self._patience, self._past, self._local = patience, past, local
        self._facts: list[Fact] = list(past.facts) if before is None else []
        self._candidates: list[Candidate] = []
        self._stores: dict[str, tuple[ObjectStore, MirrorIndex]] = {}

    @property
    def first_problem(self) -> str:
        """Why the latest candidate is refused (rank 0); '' if none is."""
        return next((each.problem for each in self._refused()), "")

    def find(self, failed: Collection[Candidate]) -> marker.Checkpoint | None:
        """Return the first candidate that all ranks verify; CheckpointError if refused."""
        self._list(failed)
        while True:
            choice = broadcast_value(self._choose(), _Choice)
            if choice.refusal:
                raise (UnreadableError if choice.may_pass else CheckpointError)(choice.refusal)
            if (candidate := choice.candidate) is None:
                return None
            try:
                return self._get(candidate)
            except OtherVersionError:
                raise  # no damage: nothing older replaces it
            except UndoneError:
                self._candidates = [each for each in self._candidates if each != candidate]
            except CheckpointError as error:
                may_pass = isinstance(error, UnreadableError)
                refused = replace(candidate, problem=str(error), may_pass=may_pass)
                self._candidates = [
                    refused if each == candidate else each for each in self._candidates
                ]

    def _choose(self) -> _Choice:
        if not self._world.is_main:
            return _Choice()
        match choose(self._facts, self._candidates, self._past.asked):
            case Refusal(sentence):
                return _Choice(None, sentence, any(each.may_pass for each in self._candidates))
            case choice:
                return _Choice(choice)

    # --------------------------------------------------------------------------- what is there

    def _list(self, failed: Collection[Candidate]) -> None:
        local = self._local.offered(self._before) if self._local else []
        with raise_on_all_ranks():
            if not self._world.is_main:
                return
            if not self._root.is_dir() and self._root.with_name("run.json").exists():
                if self._past.asked is None:  # lost, as with a mount
                    raise UnreadableError(
                        f"{self._root}: missing, although every run has it; bring it back"
                    )
                self._root.mkdir()
            files.remove_partial(self._root)
            self._add(files.steps_on_disk(self._root), Destination.RUN_DIRECTORY, str(self._root))
            self._add(local, Destination.NODES, Destination.NODES.value)
            for url in self._past.stores:
                self._list_store(url)
            problems = {(each.step, each.destination): each.problem for each in failed}
            self._candidates = [
                replace(each, problem=problems.get((each.step, each.destination), each.problem))
                for each in self._candidates
            ]

    def _add(self, steps: Sequence[int], destination: Destination, where: str) -> None:
        self._candidates += [
            Candidate(step, destination, where)
            for step in steps
            if self._before is None or step < self._before
        ]

    def _list_store(self, url: str) -> None:
        scratch = self._root.with_name(SCRATCH)
        least = newest(self._facts, Destination.RUN_DIRECTORY, Destination.STORE)
        try:
            scratch.mkdir(exist_ok=True)
            store = ObjectStore(url, scratch, QUICK)
            index = store.index()
            if index.run != self._run_id:
                return  # nothing is uploaded there, either
            steps = []
            for step in (each.step for each in index.checkpoints):
                later = step > least and self._before is None and self._past.asked is None
                if not later or self._is_fact(store, index, step):
                    steps.append(step)
        except (UserError, OSError) as error:
            if isinstance(error, NotFetchedError) and error.is_absent:
                return
            text = os_error_text(error) if isinstance(error, OSError) else str(error)
            logger.warning("%s: not asked for checkpoints: %s", url, text)
            if lost := least or self._before or self._past.asked:
                problem = f"{url} could not be asked ({text.partition(';')[0]})"
                self._candidates.append(
                    Candidate(lost, Destination.STORE, url, problem, may_pass=True)
                )
            return
        self._stores[url] = ObjectStore(url, scratch), index
        self._add(steps, Destination.STORE, url)

    def _is_fact(self, store: ObjectStore, index: MirrorIndex, step: int) -> bool:
        """Whether a step of the store, later than what the ledger knows, may be resumed from.

        If not because the ledger lacks the start that saved it, that is a fact all the same.
        """
        history = self._past.history
        try:
            attempt = store.read_index(index, step).attempt
            if not history.stands(step, attempt):
                return False
            problem = (
                f"{store.url} has step {step}, of which {self._root.parent} knows nothing, as an "
                "older copy would ('pretrain checkpoint fetch' makes another run directory of it)"
            )
            if not attempt or not history.standing or attempt in history.standing:
                problem = ""
        except CheckpointError as error:
            problem = str(error)
        self._facts.append(Fact(step, Destination.STORE, store.url))
        if not problem:
            return True
        self._candidates.append(Candidate(step, Destination.STORE, store.url, problem))
        return False

    # ---------------------------------------------------------------------------- one candidate

    def _get(self, candidate: Candidate) -> marker.Checkpoint:
        """Return the candidate once all ranks have verified it. A collective."""
        if candidate.destination is Destination.NODES:
            assert self._local is not None
            return self._local.get(candidate.step)
        if candidate.destination is Destination.STORE:
            self._bring(candidate)
        directory, start = files.step_directory(self._root, candidate.step), time.monotonic()
        index: dict[str, Any] = {}
        with raise_on_all_ranks():
            if self._world.is_main:
                found = marker.read_index(directory, self._run_id)
                if not self._past.history.stands(found.step, found.attempt):
                    raise UndoneError(f"{directory}: {marker.UNDONE}")
                index = found.index
        found = marker.Checkpoint(directory, broadcast_value(index, dict[str, Any]))
        with raise_on_all_ranks():
            marker.check_share(found, self._world.rank, self._world.world_size)
        if self._world.is_main:
            marker.remember(directory, refused="")
            what = "resuming from %s, verified in %.1f s (%s MiB by %s)"
            size, ranks = f"{found.num_bytes / 2**20:,.1f}", counted(self._world.world_size, "rank")
            logger.info(what, directory, time.monotonic() - start, size, ranks)
        return found

    def _bring(self, candidate: Candidate) -> None:
        """Bring a checkpoint of a store into the run directory; meanwhile all ranks show life."""
        problems: list[UserError] = []

        def fetch() -> None:
            try:
                store, index = self._stores[candidate.where]
                attempt = store.read_index(index, candidate.step).attempt
                if not self._past.history.stands(candidate.step, attempt):
                    raise UndoneError(f"step {candidate.step} in {store.url}: {marker.UNDONE}")
                store.bring(index, candidate.step, self._root)
            except NotFetchedError as error:
                problems.append(UnreadableError(str(error)))
            except UserError as error:
                problems.append(error)
            except OSError as error:
                problems.append(UnreadableError(os_error_text(error)))

        thread = threading.Thread(target=fetch, name="fetch", daemon=True)
        if self._world.is_main:
            thread.start()
        before = self._patience.stop_requests()
        while broadcast_value(thread.is_alive(), bool):
            self._patience.while_waiting()
            with raise_on_all_ranks():
                if self._patience.stop_requests() > before:
                    raise StorageError(
                        f"stopped, as asked, while step {candidate.step} was fetched; rerun the "
                        "command to continue"
                    )
            time.sleep(POLL_SECONDS)
        with raise_on_all_ranks():
            for problem in problems:
                raise problem

    # ------------------------------------------------------------------------------------ words

    def report(self, found: marker.Checkpoint | None = None) -> None:
        """Name what was refused and what is used instead; remember what is on disk."""
        if not self._world.is_main:
            return
        for each in self._refused():
            is_repaired = found is not None and found.step == each.step
            if each.destination is Destination.RUN_DIRECTORY and not is_repaired:
                directory = files.step_directory(self._root, each.step)
                refuse(directory, each.problem, marker.step_of(found), self._world)
            elif each.destination is Destination.NODES:
                what = "local checkpoints of step %d are not used: %s"
                logger.warning(what, each.step, each.problem)
            elif not each.may_pass:
                logger.warning("%s", marker.refusal(each.problem, marker.step_of(found)))

    def settle(self, found: marker.Checkpoint | None) -> None:
        """Let what is later than the start's step count for nothing; a save of this start replaces
        it."""
        step = found.step if found is not None else 0
        if self._world.is_main and self._before is None:
            with contextlib.suppress(CheckpointError):
                for later in files.steps_on_disk(self._root):
                    directory = files.step_directory(self._root, later)
                    if later > step and not (directory / files.REFUSED).exists():
                        marker.remember(directory, f"{marker.UNDONE} to step {step}")
        if self._world.is_main:
            shutil.rmtree(self._root.with_name(SCRATCH), ignore_errors=True)
        if self._local is not None and self._before is None:
            self._local.tell_unused(step, newest(self._facts, Destination.NODES))

    def _refused(self) -> list[Candidate]:
        return sorted(
            (each for each in self._candidates if each.problem), key=lambda each: -each.step
        )


def refuse(directory: Path, reason: str, using: str, world: World) -> None:
    """Name a checkpoint that is not used, and what is instead; remember it."""
    if world.is_main:
        logger.warning(marker.refusal(reason, using))
        marker.remember(directory, reason)
