"""The policy of restarts: what follows an attempt, and when. Pure: no processes, no clocks."""

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

# If this many first attempts all end by an unusable node, every node probably has the same problem,
# for example an old driver.
_UNUSABLE_NODES = 3
# The exit statuses of ranks when the only failure is that another rank never started.
_BYSTANDERS = {0, EXIT_STOPPED, NEVER_STARTED, -signal.SIGKILL, -signal.SIGTERM}


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """How often and how soon to restart a run that crashes. Progress means a newer checkpoint."""

    attempts_without_progress: int = 3
    first_delay: float = 1.0  # seconds; doubled for each attempt without progress
    unstarted_delay: float = 5.0  # the same after a failure of the site or a node
    longest_delay: float = 60.0


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the options of every command that restarts runs."""
    most, name = RestartPolicy.attempts_without_progress, "--attempts-without-progress"
    words = "give up after K attempts in a row without a newer checkpoint (default %(default)s)"
    parser.add_argument(name, type=int, default=most, metavar="K", help=words)


def requested_policy(arguments: argparse.Namespace) -> RestartPolicy:
    """Return the policy that the options ask for; ConfigError if it is impossible."""
    check_least(arguments, 1, "attempts_without_progress")
    return RestartPolicy(attempts_without_progress=arguments.attempts_without_progress)


class About(Enum):
    """What caused the end of an attempt. Only RUN counts against the run."""

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
    """Raised if the job should start again, perhaps without some nodes."""

    def __init__(
        self,
        reason: JobEndReason,
        message: str = "",
        nodes: Sequence[str] = (),
        rank: int | None = None,  # a rank whose node failed
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
    """Return why an attempt ended, what follows, and how many attempts in a row made no progress.

    `before`: that count before the attempt. `is_complete`: whether a checkpoint holds the last
    step. Attempts that ran out of memory do not count: each halves the micro-batch, and at one lane
    the run is refused. `may_wait`: whether to retry while the site or a node fails; `can_requeue`:
    whether another start of the job may get another node.
    """
    reason = _reason(statuses, stop_requested, is_complete, can_requeue)
    about = EVIDENCE[reason]
    counts = about is About.RUN and reason is not AttemptReason.OUT_OF_MEMORY
    count = 0 if made_progress else before + counts
    if about is About.REQUEST:
        following = NextAction.STOPPED
    elif about in (About.SITE, About.NODE):
        give_up = NextAction.REQUEUE if can_requeue else NextAction.GIVE_UP
        following = NextAction.RETRY if may_wait else give_up
    elif reason is AttemptReason.FINISHED:
        following = NextAction.FINISHED
    elif reason is AttemptReason.USER_ERROR:
        following = NextAction.REFUSED
    else:
        is_hopeless = counts and count >= policy.attempts_without_progress
        following = NextAction.GIVE_UP if is_hopeless else NextAction.RETRY
    return reason, following, count


def are_all_unusable(ledger: Sequence[Event]) -> bool:
    """Return whether all nodes seem unusable, so that another report of an unusable node ends the
    run. True if the run has never trained and its previous attempts all ended by such reports.
    """
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
    if EXIT_NODE_UNUSABLE in ends and can_requeue:  # else it is an error that the user corrects
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
    """Return the seconds until the next attempt; each of `count` failures in a row doubles them.

    After a lack of memory it is 0, because the next attempt needs less memory.
    """
    if reason is AttemptReason.OUT_OF_MEMORY:
        return 0.0
    is_waiting = EVIDENCE[reason] in (About.SITE, About.NODE)
    first = policy.unstarted_delay if is_waiting else policy.first_delay
    return min(policy.longest_delay, first * 2**count)


def unresponsive_rank(statuses: Sequence[int]) -> int | None:
    """Return the rank that made an attempt hang: the only one that had to be killed, if any.

    Ranks whose watchdogs fired are not to blame: they were waiting for it.
    """
    killed = [rank for rank, status in enumerate(statuses) if status == -signal.SIGKILL]
    return killed[0] if len(killed) == 1 else None
