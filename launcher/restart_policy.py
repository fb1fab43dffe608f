"""What follows an attempt, how often and how fast a run restarts. Pure: no processes, no clocks."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from foundation.cli import check_least
from foundation.errors import EXIT_NODE_UNUSABLE
from pretrain.rundir.events import (
    AttemptEnded,
    AttemptReason,
    Event,
    JobEndReason,
    NextAction,
    TrainingBegan,
)
from pretrain.rundir.exit_statuses import (
    EXIT_OUT_OF_MEMORY,
    EXIT_SITE_FAILED,
    EXIT_STOPPED,
    EXPLAINED,
    NEVER_STARTED,
    ended_by_watchdog,
)
from pretrain.rundir.history import find_events

_UNUSABLE_NODES = 3  # in a row, of a run that has never trained: an old driver everywhere
# How ranks end that failed only because another one never started.
_BYSTANDERS = {0, EXIT_STOPPED, NEVER_STARTED, -signal.SIGKILL, -signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How often and how fast to restart a run that crashes; progress is a newer checkpoint."""

    attempts_without_progress: int = 3
    first_delay: float = 1.0  # seconds; doubled for each attempt without progress
    unstarted_delay: float = 5.0  # the same where the site or a node failed: it needs a moment
    longest_delay: float = 60.0


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options of every command that restarts runs."""
    parser.add_argument(
        "--attempts-without-progress",
        type=int,
        default=RestartPolicy.attempts_without_progress,
        metavar="K",
        help="give up after K attempts in a row without a newer checkpoint (default %(default)s)",
    )


def requested_policy(arguments: argparse.Namespace) -> RestartPolicy:
    """Return the policy that the options ask for; ConfigError if it is impossible."""
    check_least(arguments, 1, "attempts_without_progress")
    return RestartPolicy(attempts_without_progress=arguments.attempts_without_progress)


class About(Enum):
    """What the end of an attempt is evidence about: only the run's counts against the run."""

    RUN = "run"
    NODE = "node"
    SITE = "site"
    REQUEST = "request"


EVIDENCE = {
    **dict.fromkeys(AttemptReason, About.RUN),
    AttemptReason.STOP_REQUESTED: About.REQUEST,
    AttemptReason.SITE_FAILED: About.SITE,
    AttemptReason.NOT_STARTED: About.NODE,
    AttemptReason.NODE_UNUSABLE: About.NODE,
}


class StartAgain(Exception):
    """The job should start again, perhaps without some nodes; or, outside of one, has to end."""

    def __init__(
        self,
        reason: JobEndReason,
        message: str = "",
        nodes: Sequence[str] = (),
        rank: int | None = None,  # whose node is meant
    ) -> None:
        super().__init__(message or ", ".join(nodes))
        self.reason, self.message, self.nodes, self.rank = reason, message, tuple(nodes), rank


def decide(
    statuses: Sequence[int],
    made_progress: bool,
    before: int,
    policy: RestartPolicy,
    *,
    stop_requested: bool = False,
    is_complete: bool = True,
    may_wait: bool = True,
    can_requeue: bool = True,
) -> tuple[AttemptReason, NextAction, int]:
    """Return why an attempt ended, what follows, and how many attempts in a row, with the `before`
    ones, brought no newer checkpoint.

    `is_complete`: whether a checkpoint holds the last step. Attempts that ran out of memory do not
    count: the micro-batch halves until it is one lane, where the run is refused. `may_wait`: for
    a site or a node that fails; `can_requeue`: whether another start may find another one.
    """
    reason = _reason(statuses, stop_requested, is_complete, can_requeue)
    about = EVIDENCE[reason]
    counts = about is About.RUN and reason is not AttemptReason.OUT_OF_MEMORY
    count = 0 if made_progress else before + counts
    if about is About.REQUEST:
        then = NextAction.STOPPED
    elif about in (About.SITE, About.NODE):
        give_up = NextAction.REQUEUE if can_requeue else NextAction.GIVE_UP
        then = NextAction.RETRY if may_wait else give_up
    elif reason is AttemptReason.FINISHED:
        then = NextAction.FINISHED
    elif reason is AttemptReason.USER_ERROR:
        then = NextAction.REFUSED
    else:
        is_hopeless = counts and count >= policy.attempts_without_progress
        then = NextAction.GIVE_UP if is_hopeless else NextAction.RETRY
    return reason, then, count


def are_all_unusable(ledger: Sequence[Event]) -> bool:
    """Return whether a rank's report that its node is unusable ends the run: it has never trained,
    and the attempts before ended so, too, so that another node would hardly do."""
    ends = find_events(ledger, AttemptEnded)[1 - _UNUSABLE_NODES :]
    has_trained = bool(find_events(ledger, TrainingBegan))
    reasons = [end.reason for end in ends]
    return not has_trained and reasons == [AttemptReason.NODE_UNUSABLE] * (_UNUSABLE_NODES - 1)


def _reason(
    statuses: Sequence[int], stop_requested: bool, is_complete: bool, can_requeue: bool
) -> AttemptReason:
    ends = set(statuses)
    if not any(statuses) and is_complete:
        return AttemptReason.FINISHED
    if stop_requested or {EXIT_STOPPED} <= ends <= {0, EXIT_STOPPED}:
        return AttemptReason.STOP_REQUESTED
    if EXIT_NODE_UNUSABLE in ends and can_requeue:  # else there is no other node
        return AttemptReason.NODE_UNUSABLE
    if EXIT_SITE_FAILED in ends:
        return AttemptReason.SITE_FAILED
    if not ends.isdisjoint(EXPLAINED):
        return AttemptReason.USER_ERROR
    if EXIT_OUT_OF_MEMORY in ends:
        return AttemptReason.OUT_OF_MEMORY
    if any(map(ended_by_watchdog, statuses)):
        return AttemptReason.HANG
    if {NEVER_STARTED} <= ends <= _BYSTANDERS:
        return AttemptReason.NOT_STARTED
    return AttemptReason.RANK_FAILED if any(statuses) else AttemptReason.UNSAVED


def delay_after(reason: AttemptReason, count: int, policy: RestartPolicy) -> float:
    """Return the seconds until the next attempt, after `count` in a row that ended so; 0 after a
    lack of memory, because the next attempt needs less."""
    if reason is AttemptReason.OUT_OF_MEMORY:
        return 0.0
    is_waiting = EVIDENCE[reason] in (About.SITE, About.NODE)
    first = policy.unstarted_delay if is_waiting else policy.first_delay
    return min(policy.longest_delay, first * 2**count)


def unresponsive_rank(statuses: Sequence[int]) -> int | None:
    """Return which rank made an attempt hang: the only one that had to be killed, if any. The rank
    whose watchdog fires first was waiting for it."""
    killed = [rank for rank, status in enumerate(statuses) if status == -signal.SIGKILL]
    return killed[0] if len(killed) == 1 else None
