"""What a start resumes from: all ranks look at the run directory, the nodes' disks and the stores.

Rank 0 lists what is there and asks `choose_candidate` (`facts.py`); all ranks verify its choice
together, each its share of the files. If any of them rejects it, rank 0 notes why and asks again.
What only a store has is first brought into the run directory, so there is one way to resume.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data_pipeline.corpora.fetch import NotFetchedError
from data_pipeline.corpora.web_requests import RetryPolicy
from foundation.errors import UserError, os_error_text
from foundation.files import make_directory
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.facts import (
    Candidate,
    Destination,
    Fact,
    Past,
    Refusal,
    choose_candidate,
    newest,
)
from pretrain.checkpoint.index import Checkpoint, read_index
from pretrain.checkpoint.local_checkpoints import LocalCheckpoints
from pretrain.checkpoint.object_store import SCRATCH, MirrorIndex, ObjectStore
from pretrain.checkpoint.storage_retry import WAITS, StorageRetry, WriteFailures
from pretrain.checkpoint.verify import (
    UNDONE,
    check_share,
    is_undone,
    note_refusal,
    rejection,
    step_name,
)
from pretrain.distributed.collectives import broadcast_value, raise_on_all_ranks, read_on_main
from pretrain.distributed.world import World
from pretrain.errors import (
    CheckpointError,
    OtherVersionError,
    StorageError,
    UndoneError,
    UnreadableError,
)
from pretrain.terminal.text import counted

logger = logging.getLogger(__name__)

FETCH_POLL_SECONDS = 0.2
# A store is asked at every start, and one that is away must not delay one for minutes.
QUICK = RetryPolicy(attempts=2, timeout=5.0, bytes_per_second=4e6)
NO_PAST = Past()


def find_resume_point(
    root: Path,
    world: World,
    run_id: str,
    before: int | None = None,
    retry: StorageRetry | None = None,
    past: Past = NO_PAST,
    local: LocalCheckpoints | None = None,
    failed: Collection[Candidate] = (),
) -> Checkpoint | None:
    """Return the latest whole checkpoint (of a step below `before`); None to start from scratch.

    Rank 0 reads the index for all; each rank hashes its share of the files. A checkpoint that one
    rank rejects is rejected on all, logged, and gets a note (`note_refusal`). Candidates that have
    `failed` a moment ago are not tried again. CheckpointError on all ranks where there is nothing
    to resume from; where storage fails, only after the time of `retry`.
    """
    retry = retry or StorageRetry()
    failures = WriteFailures(retry)
    failures.run_waits()
    while True:
        look = _Look(root, world, run_id, before, retry, past, local)
        try:
            checkpoint = look.find(failed)
        except UnreadableError as error:
            rejected = look.rejected  # on rank 0
            problem = rejected[0].problem if rejected else str(error)
            failures.failed(problem, WAITS, "check the disk or file server")
            if broadcast_value(failures.is_over_limit, bool):  # rank 0's clock decides
                look.report()
                raise
            with raise_on_all_ranks():
                failures.pause()
        except CheckpointError:
            look.report()
            raise
        else:
            failures.ended()
            look.report(checkpoint)
            look.settle(checkpoint)
            return checkpoint


@dataclass
class _Look:
    """One look at all destinations. What it lists is on rank 0 alone."""

    root: Path
    world: World
    run_id: str
    before: int | None
    retry: StorageRetry
    past: Past
    local: LocalCheckpoints | None
    facts: list[Fact] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    stores: dict[str, tuple[ObjectStore, MirrorIndex]] = field(default_factory=dict)

    @property
    def rejected(self) -> list[Candidate]:
        """The candidates with problems, the latest first (rank 0)."""
        rejected = [candidate for candidate in self.candidates if candidate.problem]
        return sorted(rejected, key=lambda candidate: -candidate.step)

    def find(self, failed: Collection[Candidate]) -> Checkpoint | None:
        """Return the first candidate that all ranks verify; CheckpointError if refused."""
        self.facts = list(self.past.facts) if self.before is None else []
        self._list(failed)
        while True:
            choice = choose_candidate(self.facts, self.candidates, self.past.asked)
            choice = broadcast_value(choice, Candidate | Refusal | None)  # rank 0's
            if isinstance(choice, Refusal):
                raise (UnreadableError if choice.may_pass else CheckpointError)(choice.sentence)
            if (candidate := choice) is None:
                return None
            try:
                return self._get(candidate)
            except OtherVersionError:
                raise  # no damage: nothing older replaces it
            except UndoneError:  # other ranks than 0 have listed nothing
                self.candidates = [other for other in self.candidates if other != candidate]
            except CheckpointError as error:
                may_pass = isinstance(error, UnreadableError)
                refused = replace(candidate, problem=str(error), may_pass=may_pass)
                self.candidates = [
                    refused if other == candidate else other for other in self.candidates
                ]

    def _list(self, failed: Collection[Candidate]) -> None:
        local = self.local.offered(self.before) if self.local else []
        with raise_on_all_ranks():
            if not self.world.is_main:
                return
            if not self.root.is_dir() and self.root.with_name("run.json").exists():
                if self.past.asked is None:  # lost, as with a mount
                    raise UnreadableError(
                        f"{self.root}: missing, although every run has it; bring it back"
                    )
                make_directory(self.root)
            files.remove_partial(self.root)
            self._add(files.steps_on_disk(self.root), Destination.RUN_DIRECTORY, str(self.root))
            self._add(local, Destination.NODES, Destination.NODES.value)
            for url in self.past.stores:
                self._list_store(url)
            problems = {(known.step, known.destination): known.problem for known in failed}
            for number, candidate in enumerate(self.candidates):
                if problem := problems.get((candidate.step, candidate.destination)):
                    self.candidates[number] = replace(candidate, problem=problem)

    def _add(self, steps: Sequence[int], destination: Destination, where: str) -> None:
        self.candidates += [
            Candidate(step, destination, where)
            for step in steps
            if self.before is None or step < self.before
        ]

    def _list_store(self, url: str) -> None:
        scratch = self.root.with_name(SCRATCH)
        least = newest(self.facts, Destination.RUN_DIRECTORY, Destination.STORE)
        try:
            scratch.mkdir(exist_ok=True)
            store = ObjectStore(url, scratch, QUICK)
            index = store.index()
            if index.run != self.run_id:
                return  # nothing is uploaded there, either
            steps = []
            for step in (stored.step for stored in index.checkpoints):
                later = step > least and self.before is None and self.past.asked is None
                if not later or self._is_fact(store, index, step):
                    steps.append(step)
        except (UserError, OSError) as error:
            if isinstance(error, NotFetchedError) and error.is_absent:
                return
            text = os_error_text(error)
            logger.warning("%s: not asked for checkpoints: %s", url, text)
            if lost := least or self.before or self.past.asked:
                problem = f"{url} could not be asked ({text.partition(';')[0]})"
                self.candidates.append(
                    Candidate(lost, Destination.STORE, url, problem, may_pass=True)
                )
            return
        self.stores[url] = ObjectStore(url, scratch), index
        self._add(steps, Destination.STORE, url)

    def _is_fact(self, store: ObjectStore, index: MirrorIndex, step: int) -> bool:
        """Return whether a step of the store that is unknown to the ledger may be resumed from.

        If the ledger lacks the start that saved it, the step is a fact all the same.
        """
        history = self.past.history
        try:
            attempt = store.read_index(index, step).attempt
            if not history.stands(step, attempt):
                return False
            problem = (
                f"{store.url} has step {step}, of which {self.root.parent} knows nothing, as an "
                "older copy would ('pretrain checkpoint fetch' makes another run directory of it)"
            )
            if not attempt or not history.standing or attempt in history.standing:
                problem = ""
        except CheckpointError as error:
            if step in self.past.saved:
                return False  # the ledger knows it, as undone: it is later than all that stands
            problem = str(error)
        self.facts.append(Fact(step, Destination.STORE, store.url))
        if not problem:
            return True
        self.candidates.append(Candidate(step, Destination.STORE, store.url, problem))
        return False

    def _get(self, candidate: Candidate) -> Checkpoint:
        """Return the candidate once all ranks have verified it. A collective."""
        if candidate.destination is Destination.NODES:
            assert self.local is not None
            return self.local.get(candidate.step)
        if candidate.destination is Destination.STORE:
            self._bring(candidate)
        directory, start = files.step_directory(self.root, candidate.step), time.monotonic()

        def index() -> dict[str, Any]:
            read = read_index(directory, self.run_id)
            if not self._stands(read):
                raise UndoneError(f"{directory}: {UNDONE}")
            return read.index

        checkpoint = Checkpoint(directory, read_on_main(self.world, index, dict[str, Any]))
        with raise_on_all_ranks():
            check_share(checkpoint, self.world.rank, self.world.world_size)
        if self.world.is_main:
            note_refusal(directory, refused="")
            size = f"{checkpoint.num_bytes / 2**20:,.1f}"
            logger.info(
                "resuming from %s, verified in %.1f s (%s MiB by %s)",
                directory, time.monotonic() - start, size, counted(self.world.world_size, "rank"),
            )  # fmt: skip
        return checkpoint

    def _stands(self, checkpoint: Checkpoint) -> bool:
        return self.past.history.stands(checkpoint.step, checkpoint.attempt)

    def _bring(self, candidate: Candidate) -> None:
        """Bring a checkpoint of a store into the run directory; meanwhile all ranks show life."""
        problems: list[UserError] = []

        def fetch() -> None:
            try:
                store, index = self.stores[candidate.where]
                if not self._stands(store.read_index(index, candidate.step)):
                    raise UndoneError(f"step {candidate.step} in {store.url}: {UNDONE}")
                store.bring(index, candidate.step, self.root)
            except (NotFetchedError, OSError) as error:
                problems.append(UnreadableError(os_error_text(error)))
            except UserError as error:
                problems.append(error)

        thread = threading.Thread(target=fetch, name="fetch", daemon=True)
        if self.world.is_main:
            thread.start()
        before = self.retry.stop_requests()
        while broadcast_value(thread.is_alive(), bool):
            self.retry.while_waiting()
            with raise_on_all_ranks():
                if self.retry.stop_requests() > before:
                    raise StorageError(
                        f"stopped, as asked, while step {candidate.step} was fetched; rerun the "
                        "command to continue"
                    )
            time.sleep(FETCH_POLL_SECONDS)
        with raise_on_all_ranks():
            for problem in problems:
                raise problem

    def report(self, checkpoint: Checkpoint | None = None) -> None:
        """Log what was rejected and what is used instead; note it in what is on disk."""
        if not self.world.is_main:
            return
        for candidate in self.rejected:
            step, problem = candidate.step, candidate.problem
            is_repaired = checkpoint is not None and checkpoint.step == step
            if candidate.destination is Destination.RUN_DIRECTORY and not is_repaired:
                directory = files.step_directory(self.root, step)
                refuse(directory, problem, step_name(checkpoint), self.world)
            elif candidate.destination is Destination.NODES:
                logger.warning("local checkpoints of step %d are not used: %s", step, problem)
            elif not candidate.may_pass:
                logger.warning("%s", rejection(problem, step_name(checkpoint)))

    def settle(self, checkpoint: Checkpoint | None) -> None:
        """Let later steps than the start's count for nothing, until a save replaces them."""
        step = checkpoint.step if checkpoint is not None else 0
        if self.world.is_main and self.before is None:
            with contextlib.suppress(CheckpointError):
                for other in files.steps_on_disk(self.root):
                    self._settle(files.step_directory(self.root, other), other, step)
        if self.world.is_main:
            shutil.rmtree(self.root.with_name(SCRATCH), ignore_errors=True)
        if self.local is not None and self.before is None:
            self.local.tell_unused(step, newest(self.facts, Destination.NODES))

    def _settle(self, directory: Path, other: int, step: int) -> None:
        """Note whether a checkpoint is part of the run's history, which is at `step`."""
        if other > step and not (directory / files.REFUSED).exists():
            note_refusal(directory, f"{UNDONE} to step {step}")
        elif other < step and is_undone(directory):
            with contextlib.suppress(CheckpointError):  # damaged: the note stays
                if self._stands(read_index(directory, self.run_id)):
                    note_refusal(directory, "")  # noted by a start that never began


def refuse(directory: Path, reason: str, using: str, world: World) -> None:
    """Log that a checkpoint is not used, and what is instead; note it there."""
    if world.is_main:
        logger.warning(rejection(reason, using))
        note_refusal(directory, reason)
