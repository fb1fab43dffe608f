"""The restart decision: what follows an attempt, and which node to leave out. Pure, without
processes or clocks."""

from __future__ import annotations

import argparse
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foundation.cli import check_least
from foundation.errors import EXIT_USER_ERROR
from foundation.progress import duration
from pretrain.rundir.events import (
    EXIT_OUT_OF_MEMORY,
    EXIT_STOPPED,
    NEVER_STARTED,
    AttemptEnded,
    AttemptReason,
    Event,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    NodeReplaced,
    SupervisorKilled,
    TrainingBegan,
    TrainingEnded,
    ended_by_watchdog,
)
from pretrain.rundir.ledger import last_of

_ATTEMPTS_PER_NODE = 2  # in a row on which a node's ranks fail first, before the node is left out


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How often and how fast to restart a run that crashes.

    Progress is a newer checkpoint, not time.
    """

    attempts_without_progress: int = 3
    first_delay: float = 1.0  # seconds; doubled for each attempt without progress
    unstarted_delay: float = 5.0  # the same where Slurm has started no rank: it may need a moment
    longest_delay: float = 60.0


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command that restarts runs."""
    parser.add_argument(
        "--attempts-without-progress",
        type=int,
        default=RestartPolicy.attempts_without_progress,
        metavar="K",
        help="give up after K attempts in a row without a newer checkpoint (default %(default)s)",
    )


def policy_of(arguments: argparse.Namespace) -> RestartPolicy:
    """The policy that the options ask for; ConfigError if it is impossible."""
    check_least(arguments, 1, "attempts_without_progress")
    return RestartPolicy(attempts_without_progress=arguments.attempts_without_progress)


def decide(
    statuses: Sequence[int],
    made_progress: bool,
    before: int,
    policy: RestartPolicy,
    *,
    stop_requested: bool = False,
    is_complete: bool = True,
) -> tuple[AttemptReason, NextAction, int]:
    """Why an attempt ended, what follows, and how many attempts in a row brought no newer
    checkpoint; `before` this one there were so many.

    `is_complete`: whether a checkpoint holds the last step. Attempts that ran out of memory do not
    count: the micro-batch halves until it is one lane, where the run is refused.
    """
    lacks_memory = EXIT_OUT_OF_MEMORY in statuses
    count = 0 if made_progress else before + (not lacks_memory)
    is_hopeless = count >= policy.attempts_without_progress
    then = NextAction.GIVE_UP if is_hopeless else NextAction.RETRY
    if not any(statuses) and is_complete:
        return AttemptReason.FINISHED, NextAction.FINISHED, count
    if stop_requested or {EXIT_STOPPED} <= set(statuses) <= {0, EXIT_STOPPED}:
        return AttemptReason.STOP_REQUESTED, NextAction.STOPPED, count
    if EXIT_USER_ERROR in statuses:
        return AttemptReason.USER_ERROR, NextAction.REFUSED, count
    if lacks_memory:
        return AttemptReason.OUT_OF_MEMORY, NextAction.RETRY, count
    if any(map(ended_by_watchdog, statuses)):
        return AttemptReason.HANG, then, count
    return AttemptReason.RANK_FAILED if any(statuses) else AttemptReason.UNSAVED, then, count


def delay_after(statuses: Sequence[int], count: int, policy: RestartPolicy) -> float:
    """Seconds until the next attempt, after `count` in a row without a newer checkpoint; none
    after a lack of memory, because the next attempt needs less."""
    if EXIT_OUT_OF_MEMORY in statuses:
        return 0.0
    is_unstarted = set(statuses) == {NEVER_STARTED}
    first = policy.unstarted_delay if is_unstarted else policy.first_delay
    return min(policy.longest_delay, first * 2**count)


def unresponsive_rank(statuses: Sequence[int]) -> int | None:
    """Which rank made an attempt hang: the only one that had to be killed; None if there are
    several or none.

    The rank whose watchdog fires first is not it: that rank was waiting for another one.
    """
    killed = [rank for rank, status in enumerate(statuses) if status == -signal.SIGKILL]
    return killed[0] if len(killed) == 1 else None


# ------------------------------------------------------------------- former starts of a job


def refusal_of_futile_starts(ledger: Sequence[Event], job: str, most: int, time_limit: str) -> str:
    """Why this job must not start again: its last `most` starts in a row were ended by the time
    limit, and each took longer to start than it trained for a checkpoint; empty if it may."""
    starts: list[tuple[float, float]] = []  # seconds until training began, and in saved training
    start: JobStarted | None = None
    first_began = began = None
    training = 0.0
    for event in ledger:
        if isinstance(event, JobStarted) and event.job == job:
            start, first_began, began, training = event, None, None, 0.0
        elif isinstance(event, TrainingBegan):
            first_began, began = first_began or event.time, event.time
        elif isinstance(event, (TrainingEnded, AttemptEnded)) and began is not None:
            training, began = training + event.time - began, None
        elif isinstance(event, JobEnded) and event.job == job and start is not None:
            if event.reason not in (JobEndReason.TIME_LIMIT, JobEndReason.TIME_LIMIT_NEAR):
                starts.clear()
                continue
            training += 0.0 if began is None else event.time - began
            starting = (first_began or event.time) - start.time
            starts.append((starting, training if (event.step or 0) > start.step else 0.0))
    last = starts[-most:]
    if len(last) < most or any(training >= starting for starting, training in last):
        return ""
    starting, training = (duration(statistics.mean(each)) for each in zip(*last, strict=True))
    return (
        f"{most} starts in a row took {starting} to start and trained for {training} before the "
        f"time limit of {time_limit}; raise time_limit in the cluster file, then 'launcher submit'"
    )


def attempts_without_progress(ledger: Sequence[Event], job: str) -> int:
    """How many of the last attempts in a row, in all former starts of this job, brought no newer
    checkpoint; with those lost together with their supervisor.

    Attempts that were asked to stop say nothing about the run and are left out.
    """
    count = 0
    for event in ledger:
        if getattr(event, "job", None) != job:
            continue
        if isinstance(event, AttemptEnded) and event.next is not NextAction.STOPPED:
            count = event.without_progress
        elif isinstance(event, SupervisorKilled) or (
            isinstance(event, JobEnded) and event.reason is JobEndReason.FIRST_NODE_LOST
        ):
            made_progress = (event.step or 0) > (event.step_before or 0)
            count = 0 if made_progress else count + 1
    return count


def no_rank_started(ledger: Sequence[Event], job: str) -> bool:
    """Whether no rank's program was run in the last attempt of this start of the job."""
    last = last_of(ledger, JobStarted, NodeReplaced, AttemptEnded)
    if not isinstance(last, AttemptEnded) or last.job != job:
        return False
    return set(last.statuses) == {NEVER_STARTED}


def node_to_exclude(ledger: Sequence[Event], job: str, node_of: Callable[[int], str]) -> str | None:
    """The node whose ranks failed first in the last two attempts of this start of the job, both
    without progress.

    `node_of` maps a rank to its node; that mapping holds until the job starts again or replaces a
    node, so earlier attempts do not count.
    """
    attempts: list[AttemptEnded] = []
    for event in ledger:
        if isinstance(event, (JobStarted, NodeReplaced)) and event.job == job:
            attempts = []
        elif isinstance(event, AttemptEnded) and event.job == job:
            attempts.append(event)
    suspects = [
        node_of(attempt.first_failure)
        for attempt in attempts[-_ATTEMPTS_PER_NODE:]
        if attempt.first_failure is not None and attempt.step == attempt.step_before
    ]
    is_clear = len(suspects) == _ATTEMPTS_PER_NODE and len(set(suspects)) == 1
    return suspects[0] if is_clear else None
