"""What a run has published, and what a start resumes from: pure, and torch-free.

A publication is a *fact*: this step was at that destination. The ledger has the facts of the run
directory and the nodes' disks, and those that it knows of a store; mirror.json has the store's own.
What is there now are *candidates*. A start takes the newest candidate that is whole. It refuses to
go back behind the newest fact silently: either something is lost that can be brought back, or a
user chooses the step to resume from (`--from-step`).

Steps on the nodes' disks are a best effort: a node that is gone stops no start.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

EVER = 1 << 62  # a step that no run reaches


class Destination(Enum):
    """Where checkpoints are, the nearest first."""

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
    """A checkpoint that is at a destination; `problem` is why a start cannot resume from it."""

    step: int
    destination: Destination
    where: str = ""
    problem: str = ""
    may_pass: bool = False  # such as a store that does not answer


@dataclass(frozen=True)
class Refusal:
    """Why nothing is resumed: what is missing, and what to do, in one line."""

    sentence: str
    may_pass: bool = False  # the reason for one of the candidates


@dataclass(frozen=True)
class AttemptHistory:
    """Attempt -> the last of its steps that no later start, rewind or restore has undone.

    A later step belongs to a past that the run has left: another attempt makes those steps again,
    perhaps on other data. `unknown` is that last step for starts that the ledger does not have, or
    whose checkpoints do not name them.
    """

    standing: dict[str, int] = field(default_factory=dict)
    unknown: int = EVER

    def stands(self, step: int, attempt: str) -> bool:
        """Whether a checkpoint of this step, which that attempt has saved, is the run's."""
        return step <= self.standing.get(attempt, self.unknown)


@dataclass(frozen=True)
class Past:
    """What the ledger says to a start; `asked` is the step that a user wants it to resume from."""

    facts: tuple[Fact, ...] = ()
    history: AttemptHistory = field(default_factory=AttemptHistory)
    asked: int | None = None
    stores: tuple[str, ...] = ()  # URLs of the run's mirrors
    saved: tuple[int, ...] = ()  # all steps that were published, also undone ones


def add_from_step(parser: argparse.ArgumentParser) -> None:
    """Define `--from-step`: a user gives up later steps of a run."""
    parser.add_argument(
        "--from-step",
        type=int,
        metavar="N",
        help="resume from step N though the run has saved later ones; 0: from the beginning",
    )


def newest(facts: Iterable[Fact], *destinations: Destination) -> int:
    """Return the newest step at one of the destinations; 0 without any."""
    return max((fact.step for fact in facts if fact.destination in destinations), default=0)


def choose_candidate(
    facts: Sequence[Fact], candidates: Sequence[Candidate], asked: int | None = None
) -> Candidate | Refusal | None:
    """Return the candidate to resume from, the refusal, or None to start from the beginning.

    The newest candidate without a problem, at its nearest destination. Refused if that is older
    than the newest fact of run directory or store, or if there are candidates and all have
    problems. `asked` is the step of `--from-step`: that one or none, whatever is newer.
    """
    whole = [candidate for candidate in candidates if not candidate.problem]
    whole.sort(key=lambda candidate: (-candidate.step, _ORDER.index(candidate.destination)))
    least = newest(facts, Destination.RUN_DIRECTORY, Destination.STORE)
    if asked == 0 or (asked is None and not least and not candidates):
        return None
    for candidate in whole:
        if candidate.step == asked or (asked is None and candidate.step >= least):
            return candidate
    lost = asked or least or max(candidate.step for candidate in candidates)
    asks = f"--from-step asks for step {asked}, but " if asked else ""
    may_pass = any(candidate.may_pass for candidate in candidates)
    return Refusal(f"{asks}{_whereabouts(lost, facts, candidates)}; {_advice(whole)}", may_pass)


def _whereabouts(step: int, facts: Sequence[Fact], candidates: Sequence[Candidate]) -> str:
    """Describe what is known of a step that cannot be resumed from."""
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
