"""The supervisor: starts an attempt, watches it, decides what follows, until the run is finished or
hopeless; and what stops it.

The caller provides how ranks are started: on this machine, or as a step of a Slurm job. The restart
decision, which says what follows an attempt and which node to leave out, is pure, without processes
or clocks.
"""

from __future__ import annotations

import argparse
import logging
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from foundation.cli import check_least
from foundation.errors import EXIT_USER_ERROR
from foundation.progress import duration
from foundation.retry import Patience, outlast
from pretrain.checkpoint import marker
from pretrain.config.run import RunConfig
from pretrain.rundir.events import (
    EXIT_OUT_OF_MEMORY,
    EXIT_STOPPED,
    NEVER_STARTED,
    AttemptEnded,
    AttemptReason,
    Event,
    Interrupted,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    NodeReplaced,
    Outcome,
    SupervisorKilled,
    TrainingBegan,
    TrainingEnded,
    ended_by_watchdog,
)
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir, attempts_of

_log = logging.getLogger(__name__)

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


HOLDER = "launcher"  # of the lock RUN/launcher.lock


class StopSignals:
    """Counts the signals that ask to stop, instead of dying of them.

    The supervisor has to outlive its ranks, which save a checkpoint first, and to record how they
    ended. So: SIGINT and SIGTERM ask the ranks to save and stop; a second SIGINT (Ctrl-C) kills
    them. A second SIGTERM does not: Slurm sends several while a job ends. SIGUSR1, which `sbatch
    --signal` sends ahead of the time limit, asks too. SIGUSR2 goes to the ranks alone (see
    srun.py). `received` has all signals in order.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.received: list[int] = []
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._count)
        # In a batch job they were blocked until now (launcher/slurm/batch_process.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def patience(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> Patience:
        """How a supervisor waits for its run directory, with a call about once a second.

        Unlike a rank, which has a checkpoint to save, it also gives up, by a StopWhileWaiting, what
        it wants to write after a request to stop has come.
        """

        def poll() -> None:
            meanwhile()
            if self.requests:
                raise StopWhileWaiting

        return Patience(seconds, while_waiting=poll)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self.requests += 1 if number == signal.SIGINT or not self.requests else 0


class StopWhileWaiting(Exception):
    """The supervisor was asked to stop, and storage does not work: what it was to write is not
    written."""


class Ranks(Protocol):
    """The ranks of one attempt, already started."""

    logs: list[Path]  # in rank order
    first_failure: int | None  # the rank that failed first, known after `wait`

    def wait(self, *, meanwhile: Callable[[], None]) -> Sequence[int]:
        """Exit statuses in rank order when all have exited.

        Calls `meanwhile` many times a second until then.
        """
        ...

    def terminate(self) -> None:
        """Ask every rank to stop at its next step boundary."""
        ...

    def kill(self) -> None:
        """Kill every rank immediately."""
        ...

    def describe_failure(self, statuses: Sequence[int]) -> str:
        """Which rank failed first, and the last lines of its log."""
        ...


def supervise(
    run_dir: RunDir,
    start: Callable[[int], Ranks],
    policy: RestartPolicy,
    stop: StopSignals,
    count: int = 0,
    meanwhile: Callable[[], None] = lambda: None,
    job: str | None = None,
    is_allocated: Callable[[], bool] = lambda: True,
) -> int:
    """Make attempts until the run is finished, stopped, refused or hopeless; returns the exit
    status.

    `start(number)` starts attempt `number` and returns its ranks. `count` attempts in a row before
    this call brought no newer checkpoint. `meanwhile` is called many times a second while ranks
    run. `job` is the Slurm job that the attempts belong to. Where it has lost its nodes, or is
    about to, no attempt starts, and one that failed does not count: `is_allocated` tells.
    """
    # After the highest that left logs, so that no log is written twice.
    number = max((attempt.number for attempt in attempts_of(run_dir.logs)), default=-1)
    while True:
        number += 1
        before = latest_step(run_dir)
        try:
            if run_dir.path.exists():  # else the first attempt tells what is wrong
                outlast(run_dir.patience, run_dir.check_writable)
            if not is_allocated():
                return EXIT_STOPPED
            ranks = start(number)
        except StopWhileWaiting:
            return _stopped_between_attempts(run_dir, stop, job)
        statuses = tuple(ranks.wait(meanwhile=_stopper(ranks, stop, meanwhile, job)))
        after, is_hung = latest_step(run_dir), any(map(ended_by_watchdog, statuses))
        is_complete = False  # nor is a run whose directory has vanished
        if not any(statuses) and run_dir.exists():
            is_complete = after >= run_dir.config.optim.steps
        reason, then, count = decide(
            statuses,
            after > before,
            count,
            policy,
            stop_requested=stop.requests > 0,
            is_complete=is_complete,
        )
        ended = AttemptEnded(
            attempt_number=number,
            statuses=statuses,
            first_failure=unresponsive_rank(statuses) if is_hung else ranks.first_failure,
            step_before=before,
            step=after,
            reason=reason,
            next=then,
            without_progress=count,
            job=job,
        )
        if ended.next not in (NextAction.FINISHED, NextAction.STOPPED) and not is_allocated():
            return EXIT_STOPPED
        if run_dir.exists() or run_dir.ledger.path.exists():  # else refused before there was a run
            _record(run_dir, ended)
        match ended.next:
            case NextAction.FINISHED:
                _log.info("finished: %s; next: pretrain report %s", run_dir.path, run_dir.path)
                return 0
            case NextAction.STOPPED:
                return _stopped(run_dir, job)
            case NextAction.REFUSED:  # last: what has to be fixed
                _log.error("not restarted: %s", ranks.describe_failure(statuses))
                return EXIT_USER_ERROR
            case NextAction.RETRY | NextAction.GIVE_UP:
                if any(statuses):
                    _log.error("%s", ranks.describe_failure(statuses))
        if ended.next is NextAction.GIVE_UP:
            _log.error("gave up: %s; the logs are in %s", ended.cause, run_dir.logs)
            return EXIT_USER_ERROR
        limit, delay = policy.attempts_without_progress, delay_after(statuses, count, policy)
        progress = f", attempt {count} of {limit} without progress" if count else ""
        _log.warning(
            "%s%s; next attempt in %g s from the checkpoint of step %d",
            ended.cause,
            progress,
            delay,
            ended.step,
        )
        deadline = time.monotonic() + delay
        while not stop.requests and time.monotonic() < deadline:
            time.sleep(0.05)
        if stop.requests:
            return _stopped_between_attempts(run_dir, stop, job)


def latest_step(run_dir: RunDir) -> int:
    """The step of the latest checkpoint that no start has refused; 0 if there is none."""
    return marker.latest_step(run_dir.checkpoints)


def is_complete(run_dir: RunDir, config: RunConfig) -> bool:
    """Whether the run has finished all steps of `config`, and saved the last one."""
    last = last_of(run_dir.ledger.read(), TrainingBegan, TrainingEnded)
    is_over = isinstance(last, TrainingEnded) and last.outcome is Outcome.FINISHED
    return is_over and latest_step(run_dir) >= config.optim.steps


def is_done_already(run_dir: RunDir, config: RunConfig) -> bool:
    """Whether the directory holds this run with all its steps; ConfigError if it holds another."""
    if not run_dir.exists():
        run_dir.refuse_strangers()
        return False
    RunDir.open(run_dir.path).refuse_other_run(config)
    return is_complete(run_dir, config)


def _stopper(
    ranks: Ranks, stop: StopSignals, meanwhile: Callable[[], None], job: str | None
) -> Callable[[], None]:
    """Passes the first request to stop on to the ranks; the second one kills them.

    Another SIGTERM is passed on, too, which ends a wait of the ranks for storage; not in a job, to
    which Slurm sends several.
    """
    passed_on = received = 0

    def poll() -> None:
        nonlocal passed_on, received
        meanwhile()
        is_repeated = job is None and len(stop.received) > received
        if stop.requests == passed_on and not is_repeated:
            return
        if passed_on == 0:
            _log.info("asking the ranks to save and stop; Ctrl-C again kills them")
        if passed_on in (0, stop.requests):
            ranks.terminate()
        else:
            ranks.kill()
        passed_on, received = stop.requests, len(stop.received)

    return poll


def _record(run_dir: RunDir, event: Event) -> None:
    """Write an event; if the supervisor is asked to stop before storage takes it, only log it."""
    try:
        run_dir.ledger.append(event)
    except StopWhileWaiting:
        _log.warning("not in the ledger, because storage fails: %s", event.description)


def _stopped_between_attempts(run_dir: RunDir, stop: StopSignals, job: str | None) -> int:
    if job is None:  # the end of a job is recorded with its reason
        name = signal.Signals(stop.received[-1]).name
        _record(run_dir, Interrupted(signal=name, step=latest_step(run_dir)))
    return _stopped(run_dir, job)


def _stopped(run_dir: RunDir, job: str | None) -> int:
    """Say that no further attempt is made; the exit status. In a job nobody types the same command
    again: its end says what has to be done."""
    # A start would resume, also from step 0.
    is_saved = bool(marker.steps_that_count(run_dir.checkpoints))
    saved = f" after the checkpoint of step {latest_step(run_dir)}" if is_saved else ""
    again = "" if job else "; rerun the same command to continue"
    _log.info("stopped on request%s%s", saved or "; nothing was saved", again)
    return EXIT_STOPPED
