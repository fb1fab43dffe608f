"""What follows an attempt, how often and how fast a run restarts. Pure: no processes, no clocks."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from foundation.cli import check_least
from foundation.errors import EXIT_USER_ERROR
from pretrain.rundir.events import (
    EXIT_OUT_OF_MEMORY,
    EXIT_STOPPED,
    NEVER_STARTED,
    AttemptReason,
    NextAction,
    ended_by_watchdog,
)


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
