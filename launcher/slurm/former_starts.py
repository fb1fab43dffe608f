"""Former starts of a Slurm job and their attempts, from the ledger. Pure."""

import statistics
from collections.abc import Callable, Sequence

from foundation.progress import duration
from launcher.restart_policy import EVIDENCE, About
from launcher.slurm.client import node_names
from pretrain.rundir.events import (
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
)
from pretrain.rundir.history import find_events, last_event

# Ends of starts whose supervisor has recorded no end of the last attempt.
_UNDECIDED = (JobEndReason.FIRST_NODE_LOST, JobEndReason.SUPERVISOR_FAILED, JobEndReason.NO_STEPS)
_ATTEMPTS_PER_NODE = 2  # a node is excluded if its ranks fail first in this many attempts in a row


def end_of_start(ledger: Sequence[Event], job: str, restart: int) -> JobEnded | None:
    """Return the end of this start of the job, if a supervisor recorded it before it was killed.

    The end of a start that the controller forgot does not count, even if it had the same number.
    """
    last = last_event([end for end in find_events(ledger, JobEnded) if end.job == job], JobEnded)
    is_own = last and last.restart == restart and last.reason is not JobEndReason.FORGOTTEN
    return last if is_own else None


def open_start(ledger: Sequence[Event], job: str) -> JobStarted | None:
    """Return the last start of this job, if the ledger has no end of it."""
    last = last_event([e for e in ledger if getattr(e, "job", "") == job], JobStarted, JobEnded)
    return last if isinstance(last, JobStarted) else None


def other_jobs(ledger: Sequence[Event], job: str) -> list[str]:
    """Return the jobs that started before this one and have no end in the ledger, latest first."""
    open_jobs: dict[str, None] = {}
    for event in ledger:
        if isinstance(event, JobStarted):
            if event.job == job:
                break
            open_jobs[event.job] = None
        elif isinstance(event, JobEnded) and not event.requeued:
            open_jobs.pop(event.job, None)
    return list(reversed(open_jobs))


def refusal_of_futile_starts(
    ledger: Sequence[Event], job: str, most: int, time_limit: str, usual_limit: str = ""
) -> str:
    """Return why this job must not start again; '' if it may.

    It must not if the time limit ended all of its last `most` starts, and each took longer to start
    than it trained (0 s if it saved no new checkpoint). `usual_limit`: the cluster file's time
    limit, if this job's was shortened.
    """
    starts: list[tuple[float, float]] = []  # (seconds until training, seconds of saved training)
    start: JobStarted | None = None
    began: TrainingBegan | None = None
    for event in ledger:
        if isinstance(event, JobStarted) and event.job == job:
            start, began = event, None
        elif isinstance(event, TrainingBegan):
            began = began or event
        elif isinstance(event, JobEnded) and event.job == job and start is not None:
            if event.reason not in (JobEndReason.TIME_LIMIT, JobEndReason.TIME_LIMIT_NEAR):
                starts.clear()
                continue
            began_at = began.time if began else event.time
            is_saved = (event.step or 0) > start.step
            starts.append((began_at - start.time, (event.time - began_at) * is_saved))
    last = starts[-most:]
    if len(last) < most or any(training >= starting for starting, training in last):
        return ""
    starting, training = (duration(statistics.mean(times)) for times in zip(*last, strict=True))
    advice = "raise time_limit in the cluster file, then 'launcher submit'"
    if usual_limit:
        advice = f"it was shortened for this job, the cluster file has {usual_limit}: "
        advice += "'launcher resume' submits another job"
    return (
        f"{most} starts in a row took {starting} to start and trained for {training} before the "
        f"time limit of {time_limit}; {advice}"
    )


def attempts_without_progress(ledger: Sequence[Event], job: str) -> int:
    """Return how many attempts in a row, over all starts of this job, made no newer checkpoint.

    Attempts that were lost with their supervisor count; attempts that were asked to stop do not.
    """
    count = 0
    for event in ledger:
        if getattr(event, "job", None) != job:
            continue
        if isinstance(event, AttemptEnded) and event.next is not NextAction.STOPPED:
            count = event.without_progress
        elif isinstance(event, SupervisorKilled) or (
            isinstance(event, JobEnded) and event.reason in _UNDECIDED
        ):
            made_progress = (event.step or 0) > (event.step_before or 0)
            count = 0 if made_progress else count + 1
    return count


def starts_without_progress(ledger: Sequence[Event], job: str) -> int:
    """Return how many starts of this job in a row the site has ended without a newer checkpoint.

    A start that excluded some of its nodes, but not all, does not count: the next has other nodes.
    """
    count = saved = num_nodes = 0
    for event in ledger:
        if not isinstance(event, (JobStarted, JobEnded)) or event.job != job:
            continue
        if isinstance(event, JobStarted):
            num_nodes = len(event.nodes)
        elif event.reason is JobEndReason.NOT_STARTED:
            num_excluded = len(node_names(event.node or ""))
            count += num_excluded in (0, num_nodes)
        if (step := event.step or 0) > saved:
            count, saved = 0, step
    return count


def node_to_exclude(ledger: Sequence[Event], job: str, node_of: Callable[[int], str]) -> str | None:
    """Return the node to exclude: its ranks failed first in the last two attempts of this start,
    both without progress. One attempt is enough if the rank reported an unusable node.

    `node_of` returns a rank's present node, so attempts before a replacement do not count.
    """
    attempts: list[AttemptEnded] = []
    for event in ledger:
        if isinstance(event, (JobStarted, NodeReplaced)) and event.job == job:
            attempts = []
        elif isinstance(event, AttemptEnded) and event.job == job:
            attempts.append(event)
    for last in attempts[-1:]:
        if last.reason is AttemptReason.NODE_UNUSABLE and last.first_failure is not None:
            return node_of(last.first_failure)
    suspects = [
        node_of(attempt.first_failure)
        for attempt in attempts[-_ATTEMPTS_PER_NODE:]
        if attempt.first_failure is not None
        and attempt.step == attempt.step_before
        and EVIDENCE[attempt.reason] is About.RUN
    ]
    is_clear = len(suspects) == _ATTEMPTS_PER_NODE and len(set(suspects)) == 1
    return suspects[0] if is_clear else None
