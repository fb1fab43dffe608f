"""The search for the checkpoint that a start resumes from.

Rank 0 lists the run directory and the object stores; every rank lists its own node's disk. Rank 0
asks `choose_candidate` (`facts.py`) which checkpoint to try, and all ranks verify it together: each
reads its share of the files. If a rank rejects it, rank 0 notes why and asks again. A checkpoint
that only a store has is first fetched into the run directory, so there is one way to resume.
"""

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
from pretrain.checkpoint import retention
from pretrain.checkpoint.facts import (
    EVER,
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
# Every start asks each store; a store that does not respond must not delay the start for minutes.
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
    """Return the latest valid checkpoint (of a step below `before`); None to start from scratch.

    A collective. A checkpoint that one rank rejects is rejected on all, logged, and gets a note
    (`note_refusal`). Candidates that have just `failed` to load are not tried again. Raises
    CheckpointError on all ranks if the start is refused. While storage fails, the search is
    repeated; once that has lasted for the time of `retry`, UnreadableError is raised.
    """
    retry = retry or StorageRetry()
    failures = WriteFailures(retry)
    failures.run_waits()
    while True:
        search = _Search(root, world, run_id, before, retry, past, local)
        try:
            checkpoint = search.find(failed)
        except UnreadableError as error:
            rejected = search.rejected  # empty except on rank 0
            problem = rejected[0].problem if rejected else str(error)
            failures.failed(problem, WAITS, "check the disk or file server")
            if broadcast_value(failures.is_over_limit, bool):  # rank 0's clock decides
                search.report()
                raise
            with raise_on_all_ranks():
                failures.pause()
        except CheckpointError:
            search.report()
            search.note_history(EVER)  # nothing is undone: remove wrong notes of earlier starts
            raise
        else:
            failures.ended()
            search.report(checkpoint)
            search.note_history(checkpoint.step if checkpoint else 0)
            return checkpoint


@dataclass
class _Search:
    """One search of all destinations. Facts, candidates and stores are listed on rank 0 alone."""

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
        """The candidates with problems, the latest step first; empty except on rank 0."""
        rejected = [candidate for candidate in self.candidates if candidate.problem]
        return sorted(rejected, key=lambda candidate: -candidate.step)

    def find(self, failed: Collection[Candidate]) -> Checkpoint | None:
        """Return the first candidate that all ranks verify. Raises CheckpointError at a refusal."""
        self.facts = list(self.past.facts) if self.before is None else []
        self._list(failed)
        while True:
            choice = choose_candidate(self.facts, self.candidates, self.past.asked)
            choice = broadcast_value(choice, Candidate | Refusal | None)
            if isinstance(choice, Refusal):
                raise (UnreadableError if choice.is_transient else CheckpointError)(choice.sentence)
            if choice is None:
                return None
            try:
                return self._get(choice)
            except CheckpointError as error:
                others = [other for other in self.candidates if other != choice]
                if not (isinstance(error, UndoneError) or self._is_undone(choice.step)):
                    if isinstance(error, OtherVersionError):
                        raise  # it is whole: resuming from an older one would lose its steps
                    is_transient = isinstance(error, UnreadableError)
                    others.append(replace(choice, problem=str(error), is_transient=is_transient))
                self.candidates = others

    def _list(self, failed: Collection[Candidate]) -> None:
        local = self.local.offered(self.before) if self.local else []
        with raise_on_all_ranks():
            if not self.world.is_main:
                return
            if not self.root.is_dir() and self.root.with_name("run.json").exists():
                # Every run has this directory from its first start on. Without it, say because a
                # file system is not mounted, a start from scratch would replace the run.
                if self.past.asked is None:
                    raise UnreadableError(
                        f"{self.root}: missing, although every run has it; bring it back"
                    )
                make_directory(self.root)
            retention.remove_partial(self.root)
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
                return  # the folder of another run, where uploads are refused as well
            most = least if self.before is None and self.past.asked is None else EVER
            steps = [stored.step for stored in index.checkpoints]
            steps = [s for s in steps if s <= most or self._admit_unknown(store, index, s)]
        except (UserError, OSError) as error:
            if isinstance(error, NotFetchedError) and error.is_absent:
                return
            text = os_error_text(error)
            logger.warning("%s: not asked for checkpoints: %s", url, text)
            # The store may have the step that the run needs. A candidate with a transient problem
            # keeps the start from resuming from an earlier step, and makes it search again.
            needed = least or self.before or self.past.asked
            if needed:
                problem = f"{url} could not be asked ({text.partition(';')[0]})"
                self.candidates.append(
                    Candidate(needed, Destination.STORE, url, problem, is_transient=True)
                )
            return
        self.stores[url] = ObjectStore(url, scratch), index
        self._add(steps, Destination.STORE, url)

    def _admit_unknown(self, store: ObjectStore, index: MirrorIndex, step: int) -> bool:
        """Add a stored step that the ledger lacks to the facts; return whether to offer it.

        If the ledger lacks even the attempt that saved the step, the run directory is an older copy
        of the run. Then the step is a fact, so no start may resume from an earlier one, but it is
        not offered either: resuming from it would mix two histories.
        """
        history = self.past.history
        try:
            attempt = store.read_index(index, step).attempt
            if not history.stands(step, attempt):
                return False
            problem = (
                f"{store.url} has step {step}, which {self.root.parent} lacks: this directory is "
                "an older copy ('pretrain checkpoint fetch' restores the step elsewhere)"
            )
            if not attempt or not history.standing or attempt in history.standing:
                problem = ""
        except CheckpointError as error:
            if self._is_undone(step):
                return False
            problem = str(error)
        self.facts.append(Fact(step, Destination.STORE, store.url))
        if not problem:
            return True
        self.candidates.append(Candidate(step, Destination.STORE, store.url, problem))
        return False

    def _is_undone(self, step: int) -> bool:
        """Return whether the run has published this step, and then undone it."""
        return step in self.past.saved and all(fact.step != step for fact in self.past.facts)

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
        """Fetch a checkpoint of a store into the run directory. A collective.

        Rank 0 fetches in a thread, so that all ranks can report progress to their watchdogs.
        """
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
        """Log which checkpoints were rejected and which one is used; note it in those on disk."""
        if not self.world.is_main:
            return
        for candidate in self.rejected:
            step, problem = candidate.step, candidate.problem
            # The same step, fetched from a store, has replaced the damaged directory.
            is_repaired = checkpoint is not None and checkpoint.step == step
            if candidate.destination is Destination.RUN_DIRECTORY and not is_repaired:
                directory = files.step_directory(self.root, step)
                refuse(directory, problem, step_name(checkpoint), self.world)
            elif candidate.destination is Destination.NODES:
                logger.warning("local checkpoints of step %d are not used: %s", step, problem)
            elif not candidate.is_transient:
                logger.warning("%s", rejection(problem, step_name(checkpoint)))

    def note_history(self, step: int) -> None:
        """Note in the checkpoints after `step` that they are undone, so nothing counts them.

        A new save of such a step replaces the directory, and the note with it.
        """
        if self.world.is_main and self.before is None:
            with contextlib.suppress(CheckpointError):
                for other in files.steps_on_disk(self.root):
                    self._note_undone(files.step_directory(self.root, other), other, step)
        if self.world.is_main:
            shutil.rmtree(self.root.with_name(SCRATCH), ignore_errors=True)
        if self.local is not None and self.before is None and step < EVER:
            self.local.log_unused(step, newest(self.facts, Destination.NODES))

    def _note_undone(self, directory: Path, other: int, step: int) -> None:
        """Note that the checkpoint of `other` is undone if the run resumes from an earlier `step`.

        Remove a wrong note if the run resumes from a later `step`.
        """
        if other > step and not (directory / files.REFUSED).exists():
            note_refusal(directory, f"{UNDONE} to step {step}")
        elif other < step and is_undone(directory):
            with contextlib.suppress(CheckpointError):  # damaged: the note stays
                # A start wrote the note, then ended before the ledger had its TrainingBegan: the
                # run did not go back.
                if self._stands(read_index(directory, self.run_id)):
                    note_refusal(directory, "")


def refuse(directory: Path, reason: str, using: str, world: World) -> None:
    """Log why a checkpoint is rejected and which one is used; note the reason in its directory."""
    if world.is_main:
        logger.warning(rejection(reason, using))
        note_refusal(directory, reason)
