"""The choice of the checkpoint to resume from, by what the run has published. Pure, torch-free.

A publication is a *fact*: this step was at that destination. The ledger records the facts; a
store's mirror.json may have facts that the ledger lacks. The checkpoints that are there now are
*candidates*. A start takes the newest valid candidate. If it is older than the newest fact, the
start is refused: a user brings the lost checkpoint back, or chooses a step (`--from-step`).

Facts of the nodes' disks refuse no start, because a lost node takes its local checkpoints with it.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

EVER = 1 << 62  # a step that no run reaches


class Destination(Enum):
    """Where checkpoints are kept, the fastest to read first."""

    RUN_DIRECTORY = "run directory"
    NODES = "nodes' disks"
    STORE = "object store"


_ORDER = list(Destination)


@dataclass(frozen=True)
class Fact:
    """The checkpoint of `step` was whole at the destination; `where` is a path or URL."""

    step: int
    destination: Destination
    where: str = ""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint at a destination; `problem` is why a start cannot resume from it, or ''."""

    step: int
    destination: Destination
    where: str = ""
    problem: str = ""
    is_transient: bool = False  # the problem may pass, as when a store does not respond


@dataclass(frozen=True)
class Refusal:
    """Why a start is refused: what is missing and what to do, in one line."""

    sentence: str
    is_transient: bool = False  # the problem of at least one candidate is transient


@dataclass(frozen=True)
class AttemptHistory:
    """The last step of each attempt that no later start, rewind or restore has undone.

    Later steps of the attempt are undone: another attempt makes them again, perhaps on other data.
    `unknown` is the last step for attempts that the ledger lacks and for checkpoints that do not
    name their attempt.
    """

    standing: dict[str, int] = field(default_factory=dict)
    unknown: int = EVER

    def stands(self, step: int, attempt: str) -> bool:
        """Whether a checkpoint of this step, saved by that attempt, is not undone."""
        return step <= self.standing.get(attempt, self.unknown)


@dataclass(frozen=True)
class Past:
    """What the ledger has for the choice; `asked` is the step of `--from-step`, if given."""

    facts: tuple[Fact, ...] = ()
    history: AttemptHistory = field(default_factory=AttemptHistory)
    asked: int | None = None
    stores: tuple[str, ...] = ()  # URLs of the run's mirrors
    saved: tuple[int, ...] = ()  # all steps that were published, also undone ones
    stored: Fact | None = None  # the last upload or restore
    windows: tuple[tuple[int, int], ...] = ()  # first segment that is skipped, and first after it
    shortages: tuple[tuple[int, dict[str, Any]], ...] = ()  # micro_batch_lanes, settings too large
    environment: dict[str, str] | None = None  # versions, devices and threads of the last start


def add_from_step(parser: argparse.ArgumentParser) -> None:
    """Define `--from-step`: the user gives up all later steps of the run."""
    words = "resume from step N though the run has saved later ones; 0: from the beginning"
    parser.add_argument("--from-step", type=int, metavar="N", help=words)


def newest(facts: Iterable[Fact], *destinations: Destination) -> int:
    """Return the newest step that the facts name at one of the destinations; 0 without facts."""
    return max((fact.step for fact in facts if fact.destination in destinations), default=0)


def choose_candidate(
    facts: Sequence[Fact], candidates: Sequence[Candidate], asked: int | None = None
) -> Candidate | Refusal | None:
    """Return the candidate to resume from, a refusal, or None to start from the beginning.

    The candidate is the newest one without a problem, at its fastest destination. The start is
    refused if it is older than the newest fact of the run directory or a store, or if all their
    candidates have problems. With `asked`, the step of `--from-step`, only that step will do.
    """
    whole = [candidate for candidate in candidates if not candidate.problem]
    whole.sort(key=lambda candidate: (-candidate.step, _ORDER.index(candidate.destination)))
    least = newest(facts, Destination.RUN_DIRECTORY, Destination.STORE)
    if asked == 0:
        return None
    for candidate in whole:
        if candidate.step == asked or (asked is None and candidate.step >= least):
            return candidate
    lasting = [other for other in candidates if other.destination is not Destination.NODES]
    if asked is None and not least and not lasting:
        return None
    lost = asked or least or max(candidate.step for candidate in candidates)
    asks = f"--from-step asks for step {asked}, but " if asked else ""
    is_transient = any(candidate.is_transient for candidate in candidates)
    return Refusal(
        f"{asks}{_describe_lost(lost, facts, candidates)}; {_advice(whole)}", is_transient
    )


def _describe_lost(step: int, facts: Sequence[Fact], candidates: Sequence[Candidate]) -> str:
    """Describe why the step cannot be resumed from: problems, and where it is missing."""
    problems = {
        candidate.where: candidate.problem
        for candidate in candidates
        if candidate.step == step and candidate.problem
    }
    places = dict.fromkeys(fact.where for fact in facts if fact.step == step)
    gone = [where for where in places if where not in problems]
    parts = [*problems.values()]
    parts += [f"step {step} was saved in {where} and is not there" for where in gone]
    return " and ".join(parts) or f"there is no checkpoint of step {step}"


def _advice(whole: Sequence[Candidate]) -> str:
    left = f"the latest besides is step {whole[0].step} in {whole[0].where}" if whole else ""
    step = whole[0].step if whole else 0
    begin = "" if whole else " from the beginning"
    return (
        f"{left or 'no other checkpoint is left'}; bring it back, or continue all the same{begin} "
        f"with --from-step {step}"
    )
