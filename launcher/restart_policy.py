"""What to do after an attempt: a pure policy, without processes or clocks."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from data_pipeline.errors import EXIT_USER_ERROR, ConfigError
from pretrain.processes.local_ranks import EXIT_OUT_OF_MEMORY, EXIT_STOPPED, describe_exit


class NextAction(Enum):
    """What comes after an attempt."""

    FINISHED = "finished"
    STOPPED = "stopped"  # asked for; a checkpoint is behind it, or nothing was done yet
    REFUSED = "refused"  # a setting or a file is wrong: trying again would find the same
    RETRY = "retry"
    GIVE_UP = "give up"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How patient to be with a run that crashes. Progress is a newer checkpoint, not time."""

    attempts_without_progress: int = 3
    first_delay: float = (
        1.0  # seconds before the next attempt; doubled for each one without progress
    )
    longest_delay: float = 60.0


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command that keeps a run going."""
    parser.add_argument(
        "--attempts-without-progress",
        type=int,
        default=Policy.attempts_without_progress,
        metavar="K",
        help="give up after K attempts that brought no newer checkpoint (default %(default)s)",
    )


def policy_of(arguments: argparse.Namespace) -> Policy:
    """The policy that the options ask for; ConfigError if there is none such."""
    if arguments.attempts_without_progress < 1:
        raise ConfigError(
            f"--attempts-without-progress={arguments.attempts_without_progress} must be 1 or more"
        )
    return Policy(attempts_without_progress=arguments.attempts_without_progress)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt ended: exit statuses in rank order, and the newest checkpoint's step before and after it."""

    statuses: tuple[int, ...]
    step_before: int
    step_after: int
    first_failure: int | None = (
        None  # the rank that ended badly first, or gave no sign of life, where that was seen
    )
    hung: bool = False  # a rank's watchdog ended it, since a step took too long

    @property
    def made_progress(self) -> bool:
        return self.step_after > self.step_before

    @property
    def ran_out_of_memory(self) -> bool:
        return EXIT_OUT_OF_MEMORY in self.statuses


@dataclass(frozen=True, kw_only=True)
class Decision:
    action: NextAction
    reason: str
    delay: float = 0.0  # seconds until a RETRY


def decide(attempts: Sequence[Attempt], policy: Policy, stop_requested: bool = False) -> Decision:
    """What follows from all attempts so far, the last one just ended."""
    last = attempts[-1]
    if not any(last.statuses):
        return Decision(action=NextAction.FINISHED, reason="every rank finished")
    if stop_requested or all(status in (0, EXIT_STOPPED) for status in last.statuses):
        return Decision(action=NextAction.STOPPED, reason="stopped on request")
    if EXIT_USER_ERROR in last.statuses:
        return Decision(action=NextAction.REFUSED, reason="a setting or a file has to change first")
    fruitless = attempts_without_progress(attempts)
    if last.ran_out_of_memory:
        return Decision(
            action=NextAction.RETRY, reason="out of memory: on with half the lanes per forward pass"
        )
    failure = failure_of(last)
    if fruitless >= policy.attempts_without_progress:
        times = "attempt" if fruitless == 1 else f"{fruitless} attempts in a row"
        return Decision(
            action=NextAction.GIVE_UP,
            reason=f"{failure}; {times} brought no checkpoint beyond step {last.step_after}",
        )
    delay = min(policy.longest_delay, policy.first_delay * 2**fruitless)
    return Decision(action=NextAction.RETRY, reason=failure, delay=delay)


def attempts_without_progress(attempts: Sequence[Attempt]) -> int:
    """How many of the last attempts in a row brought no newer checkpoint."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.made_progress:
            break
        count += (
            not attempt.ran_out_of_memory
        )  # the next one needs less; the run ends at one lane at a time
    return count


def failure_of(attempt: Attempt) -> str:
    """The first-hand failure in words."""
    if attempt.hung:
        silent = attempt.first_failure
        return "the ranks hung" + (
            "" if silent is None else f"; rank {silent} gave no sign of life"
        )
    failed = [
        rank for rank, status in enumerate(attempt.statuses) if status not in (0, EXIT_STOPPED)
    ]
    rank = failed[0] if attempt.first_failure is None else attempt.first_failure
    return f"rank {rank} {describe_exit(attempt.statuses[rank])}"


def unresponsive_rank(statuses: Sequence[int]) -> int | None:
    """Which rank of an attempt that hung is to blame: the only one that had to be killed, or nobody knows.

    The first to end is the first watchdog to lose patience, and that one's rank waited for another.
    """
    killed = [rank for rank, status in enumerate(statuses) if status == -signal.SIGKILL]
    return killed[0] if len(killed) == 1 else None
