"""The supervisor: starts an attempt, watches it, decides what follows, until the run is finished or
hopeless. Its caller says how ranks are started: on this machine, or as a step of a Slurm job."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foundation.errors import EXIT_NODE_UNUSABLE, EXIT_USER_ERROR
from foundation.progress import duration
from foundation.retry import CLOCK, Clock, outlast
from launcher.restart_policy import (
    EVIDENCE,
    About,
    RestartPolicy,
    StartAgain,
    are_all_unusable,
    decide,
    delay_after,
    unresponsive_rank,
)
from launcher.stop_signals import StopSignals, StopWhileWaiting
from pretrain.checkpoint.verify import latest_step, steps_that_count
from pretrain.config.run import RunConfig
from pretrain.rundir.attempt_files import attempts_of, open_start
from pretrain.rundir.events import (
    EXIT_STOPPED,
    AttemptEnded,
    Event,
    Interrupted,
    JobEndReason,
    NextAction,
    Outcome,
    ResumeFrom,
    TrainingBegan,
    TrainingEnded,
    ended_by_watchdog,
)
from pretrain.rundir.heartbeat import read_heartbeats
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir

_log = logging.getLogger(__name__)


class Ranks(Protocol):
    """The ranks of one attempt, already started."""

    logs: list[Path]  # in rank order
    first_failure: int | None  # the rank that failed first, known after `wait`
    was_stopped: bool  # all at once, by somebody else than this supervisor; the same

    def wait(self, *, meanwhile: Callable[[], None]) -> Sequence[int]:
        """Exit statuses in rank order when all have exited; calls `meanwhile` many times a second
        until then."""
        ...

    def terminate(self) -> None:
        """Ask every rank to stop at its next step boundary."""

    def kill(self) -> None:
        """Kill every rank immediately."""

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
    clock: Clock = CLOCK,
) -> int:
    """Make attempts until the run is finished, stopped, refused or hopeless; the exit status.

    `start(number)` starts attempt `number` and returns its ranks. `count` attempts in a row before
    this call brought no newer checkpoint. `meanwhile` is called many times a second while ranks
    run. `job` is the Slurm job that the attempts belong to. Where it has lost its nodes, or is
    about to, no attempt starts, and one that failed does not count: `is_allocated` tells.
    StartAgain where the site or a node failed for longer than the run's patience.
    """
    # After the highest that left logs, so that no log is written twice.
    number = max((attempt.number for attempt in attempts_of(run_dir.logs)), default=-1)
    attempts = _Attempts(
        run_dir, start, policy, stop, count, meanwhile, job, is_allocated, clock, number
    )
    try:
        while (status := attempts.make_one()) is None:
            pass
        return status
    except StopWhileWaiting:
        return _stopped_between_attempts(run_dir, stop, job)


@dataclass
class _Attempts:
    """The attempts of one supervisor; see `supervise`."""

    run_dir: RunDir
    start: Callable[[int], Ranks]
    policy: RestartPolicy
    stop: StopSignals
    count: int
    meanwhile: Callable[[], None]
    job: str | None
    is_allocated: Callable[[], bool]
    clock: Clock
    number: int  # of the last one
    waits_since: float | None = None  # for a site or a node that fails
    num_waits: int = 0

    def make_one(self) -> int | None:
        """Make an attempt and wait for the next one; the exit status, if none follows."""
        run_dir, patience = self.run_dir, self.run_dir.patience
        self.number += 1
        if run_dir.path.exists():  # else the first attempt tells what is wrong
            outlast(patience, run_dir.check_writable)
        before = outlast(patience, lambda: latest_step(run_dir.checkpoints))
        if not self.is_allocated():
            return EXIT_STOPPED
        ranks = outlast(patience, lambda: self.start(self.number))
        stopper = _stopper(ranks, self.stop, self.meanwhile, self.job)
        statuses = tuple(ranks.wait(meanwhile=stopper))
        ended = self._decided(statuses, ranks, before)
        if ended.next not in (NextAction.FINISHED, NextAction.STOPPED) and not self.is_allocated():
            return EXIT_STOPPED
        if run_dir.exists() or run_dir.ledger.path.exists():  # else refused before there was a run
            _record(run_dir, ended)
        if ended.next is NextAction.FINISHED:
            _log.info("finished: %s; next: pretrain report %s", run_dir.path, run_dir.path)
            return 0
        if ended.next is NextAction.STOPPED:
            return _stopped(run_dir, self.job)
        refused = "not restarted: " if ended.next is NextAction.REFUSED else ""
        if any(statuses):
            _log.error("%s%s", refused, ranks.describe_failure(statuses))
        if ended.next is NextAction.RETRY:
            self._pause(ended)
            return None
        if ended.next is NextAction.REQUEUE:
            is_of_node = EVIDENCE[ended.reason] is About.NODE
            message = f"{ended.cause}, for {duration(self._waited)}"
            rank = ended.first_failure if is_of_node else None
            raise StartAgain(JobEndReason.NOT_STARTED, message, rank=rank)
        if ended.next is NextAction.GIVE_UP:
            _log.error("gave up: %s; the logs are in %s", ended.cause, run_dir.logs)
        return EXIT_USER_ERROR

    @property
    def _waited(self) -> float:
        """For how long the site or a node has failed."""
        return 0.0 if self.waits_since is None else self.clock.now() - self.waits_since

    def _decided(self, statuses: tuple[int, ...], ranks: Ranks, before: int) -> AttemptEnded:
        """How the attempt ended, and what follows."""
        run_dir = self.run_dir
        after = outlast(run_dir.patience, lambda: latest_step(run_dir.checkpoints))
        is_complete = False  # nor is a run whose directory has vanished
        if not any(statuses) and run_dir.exists():
            is_complete = after >= run_dir.config.optim.steps
        if after > before:
            self.waits_since = None
        can_requeue = self.job is not None
        if can_requeue and EXIT_NODE_UNUSABLE in statuses:
            can_requeue = not are_all_unusable(run_dir.ledger.read())
        reason, then, self.count = decide(
            statuses,
            after > before,
            self.count,
            self.policy,
            stop_requested=self.stop.requests > 0 or ranks.was_stopped,
            is_complete=is_complete,
            may_wait=self.waits_since is None or self._waited < run_dir.patience.seconds,
            can_requeue=can_requeue,
        )
        is_hung = any(map(ended_by_watchdog, statuses))
        return AttemptEnded(
            attempt_number=self.number,
            statuses=statuses,
            first_failure=_hung_rank(run_dir, statuses) if is_hung else ranks.first_failure,
            step_before=before,
            step=after,
            reason=reason,
            next=then,
            without_progress=self.count,
            job=self.job,
        )

    def _pause(self, ended: AttemptEnded) -> None:
        """Wait until the next attempt; StopWhileWaiting if the run is asked to stop."""
        if EVIDENCE[ended.reason] is About.RUN:
            self.waits_since, self.num_waits, num = None, 0, self.count
        else:
            if self.waits_since is None:
                self.waits_since, self.num_waits = self.clock.now(), 0
            num, self.num_waits = self.num_waits, self.num_waits + 1
        limit, progress = self.policy.attempts_without_progress, ""
        if self.count and EVIDENCE[ended.reason] is About.RUN:
            progress = f", attempt {self.count} of {limit} without progress"
        delay = delay_after(ended.reason, num, self.policy)
        _log.warning(
            "%s%s; next attempt in %g s from the checkpoint of step %d",
            ended.cause,
            progress,
            delay,
            ended.step,
        )
        deadline = self.clock.now() + delay
        while not self.stop.requests and self.clock.now() < deadline:
            self.clock.sleep(0.05)
        if self.stop.requests:
            raise StopWhileWaiting


def _hung_rank(run_dir: RunDir, statuses: Sequence[int]) -> int | None:
    """Which rank made an attempt hang: one that has not come, else one that had to be killed."""
    start = open_start(run_dir.logs, run_dir.ledger.read())
    late = start.late_rank(read_heartbeats(run_dir.heartbeats)) if start else None
    return unresponsive_rank(statuses) if late is None else late


def is_complete(run_dir: RunDir, config: RunConfig) -> bool:
    """Whether the run has finished all steps of `config`, and saved the last one."""
    last = last_of(run_dir.ledger.read(), TrainingBegan, TrainingEnded, ResumeFrom)
    is_over = isinstance(last, TrainingEnded) and last.outcome is Outcome.FINISHED
    return is_over and latest_step(run_dir.checkpoints) >= config.optim.steps


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
    """Passes the first request to stop on to the ranks; the second one kills them. Another SIGTERM
    ends a wait of the ranks for storage, but not in a job, to which Slurm sends several."""
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
        _record(run_dir, Interrupted(signal=name, step=latest_step(run_dir.checkpoints)))
    return _stopped(run_dir, job)


def _stopped(run_dir: RunDir, job: str | None) -> int:
    """Say that no further attempt is made, and outside of a job how to go on; the exit status."""
    # A start would resume, also from step 0.
    is_saved = bool(steps_that_count(run_dir.checkpoints))
    saved = f" after the checkpoint of step {latest_step(run_dir.checkpoints)}" if is_saved else ""
    again = "" if job else "; rerun the same command to continue"
    _log.info("stopped on request%s%s", saved or "; nothing was saved", again)
    return EXIT_STOPPED
