"""The supervisor: makes attempts, one after the other, until the run is finished or hopeless.

Its caller passes a function that starts ranks: on this machine, or as a step of a Slurm job.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from foundation.errors import EXIT_NODE_UNUSABLE, EXIT_USER_ERROR
from foundation.progress import duration
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
from pretrain.checkpoint.storage_retry import CLOCK, Clock, with_retries
from pretrain.checkpoint.verify import latest_step, steps_that_count
from pretrain.config.run import RunConfig
from pretrain.rundir.attempt_files import list_attempts, unfinished_start
from pretrain.rundir.events import (
    AttemptEnded,
    Event,
    Interrupted,
    JobEndReason,
    NextAction,
    Outcome,
    ResumeFrom,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.exit_statuses import EXIT_STOPPED, EXPLAINED, ended_by_watchdog
from pretrain.rundir.heartbeat import read_heartbeats
from pretrain.rundir.history import last_event
from pretrain.rundir.run_dir import RunDir

_log = logging.getLogger(__name__)


class Ranks(Protocol):
    """The ranks of one attempt, already started."""

    logs: list[Path]  # in rank order
    first_failure: int | None  # the first rank that failed; known after `wait`
    was_stopped: bool  # whether another program ended all ranks at once; known after `wait`

    def wait(self, *, meanwhile: Callable[[], None]) -> Sequence[int]:
        """Wait until all have exited; return their exit statuses in rank order. Calls `meanwhile`
        many times a second."""
        ...

    def terminate(self) -> None:
        """Ask every rank to save and stop after its current step."""

    def kill(self) -> None:
        """Kill every rank immediately."""

    def describe_failure(self, statuses: Sequence[int]) -> str:
        """Return which rank failed first, with the last lines of its log."""
        ...


@dataclass
class Supervisor:
    """Makes attempts until the run is finished, stopped, refused or hopeless."""

    run_dir: RunDir
    start: Callable[[int], Ranks]  # starts the attempt of this number
    policy: RestartPolicy
    stop: StopSignals
    count: int = 0  # attempts in a row, also of former starts, without a newer checkpoint
    meanwhile: Callable[[], None] = lambda: None  # called many times a second while ranks run
    job: str | None = None  # the id of the surrounding Slurm job
    # Whether the job has its nodes and keeps them. If not, no attempt starts, and none counts.
    is_allocated: Callable[[], bool] = lambda: True
    clock: Clock = CLOCK
    _number: int = field(default=-1, init=False)  # of the latest attempt
    # Since when the site or a node has failed (None: they work), and how many pauses there were.
    _waits_since: float | None = field(default=None, init=False)
    _num_waits: int = field(default=0, init=False)

    def run(self) -> int:
        """Make attempts; return the exit status.

        Raises StartAgain if the site or a node fails for longer than the run waits.
        """
        # Continue the numbers of earlier attempts, whose logs must not be overwritten.
        numbers = (attempt.number for attempt in list_attempts(self.run_dir.logs))
        self._number = max(numbers, default=-1)
        try:
            while (status := self._make_attempt()) is None:
                pass
            return status
        except StopWhileWaiting:
            if self.job is None:  # in a job, `JobExit` records why it ends
                name = signal.Signals(self.stop.received[-1]).name
                self._record(Interrupted(signal=name, step=self._latest_step()))
            return self._stopped()

    def _latest_step(self) -> int:
        return latest_step(self.run_dir.checkpoints)

    def _known_step(self) -> int:
        """Wait until storage responds; return the latest step."""
        with_retries(self.run_dir.retry, self.run_dir.ledger.check_present)
        return self._latest_step()

    def _make_attempt(self) -> int | None:
        """Make an attempt and wait for the next one; return the exit status if none follows."""
        run_dir, retry = self.run_dir, self.run_dir.retry
        self._number += 1
        if run_dir.path.exists():  # if not, rank 0 of the first attempt makes it
            with_retries(retry, run_dir.check_writable)
        before = self._known_step()
        if not self.is_allocated():
            return EXIT_STOPPED
        ranks = with_retries(retry, lambda: self.start(self._number))
        statuses = tuple(ranks.wait(meanwhile=self._stopper(ranks)))
        ended = self._attempt_end(statuses, ranks, before)
        if ended.next not in (NextAction.FINISHED, NextAction.STOPPED) and not self.is_allocated():
            return EXIT_STOPPED
        # If neither exists, the settings were refused before there was a run.
        if run_dir.exists() or run_dir.ledger.path.exists():
            self._record(ended)
        if ended.next is NextAction.FINISHED:
            _log.info("finished: %s; next: pretrain report %s", run_dir.path, run_dir.path)
            return 0
        if ended.next is NextAction.STOPPED:
            return self._stopped()
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
        """Seconds for which the site or a node has failed."""
        return 0.0 if self._waits_since is None else self.clock.now() - self._waits_since

    def _attempt_end(self, statuses: tuple[int, ...], ranks: Ranks, before: int) -> AttemptEnded:
        """Return how the attempt ended, and what follows."""
        run_dir = self.run_dir
        # A rank that explains its failure may have found the run gone for good: do not wait.
        is_explained = any(status in EXPLAINED for status in statuses)
        after = self._latest_step() if is_explained else self._known_step()
        is_complete = False  # stays False if the run directory has vanished
        if not any(statuses) and run_dir.exists():
            is_complete = after >= run_dir.config.optim.steps
        if after > before:
            self._waits_since = None
        can_requeue = self.job is not None
        if can_requeue and EXIT_NODE_UNUSABLE in statuses:
            can_requeue = not are_all_unusable(run_dir.ledger.read())
        reason, following, self.count = decide(
            statuses,
            after > before,
            self.count,
            self.policy,
            stop_requested=self.stop.requests > 0 or ranks.was_stopped,
            is_complete=is_complete,
            may_wait=self._waits_since is None or self._waited < run_dir.retry.seconds,
            can_requeue=can_requeue,
        )
        is_hung = any(map(ended_by_watchdog, statuses))
        return AttemptEnded(
            attempt_number=self._number,
            statuses=statuses,
            first_failure=_hung_rank(run_dir, statuses) if is_hung else ranks.first_failure,
            step_before=before,
            step=after,
            reason=reason,
            next=following,
            without_progress=self.count,
            job=self.job,
        )

    def _pause(self, ended: AttemptEnded) -> None:
        """Wait until the next attempt; StopWhileWaiting if the run is asked to stop."""
        limit, progress = self.policy.attempts_without_progress, ""
        if EVIDENCE[ended.reason] is About.RUN:
            self._waits_since, self._num_waits, num = None, 0, self.count
            if self.count:
                progress = f", attempt {self.count} of {limit} without progress"
        else:
            if self._waits_since is None:
                self._waits_since, self._num_waits = self.clock.now(), 0
            num, self._num_waits = self._num_waits, self._num_waits + 1
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

    def _stopper(self, ranks: Ranks) -> Callable[[], None]:
        """Return a function that passes requests to stop on to the ranks: the second kills them.

        Outside a job, signals that are no new request are passed on, too: they end the ranks' wait
        for storage. In a job they are not, because Slurm sends several signals for one request.
        """
        stop = self.stop
        passed_on = received = 0

        def poll() -> None:
            nonlocal passed_on, received
            self.meanwhile()
            is_repeated = self.job is None and len(stop.received) > received
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

    def _record(self, event: Event) -> None:
        """Write an event; if asked to stop before storage takes it, only log it."""
        try:
            self.run_dir.ledger.append(event)
        except StopWhileWaiting:
            _log.warning("not in the ledger, because storage fails: %s", event.description)

    def _stopped(self) -> int:
        """Log that no attempt follows and how to continue; return the exit status."""
        is_saved = bool(steps_that_count(self.run_dir.checkpoints))
        saved = f" after the checkpoint of step {self._latest_step()}" if is_saved else ""
        again = "" if self.job else "; rerun the same command to continue"
        _log.info("stopped on request%s%s", saved or "; nothing was saved", again)
        return EXIT_STOPPED


def _hung_rank(run_dir: RunDir, statuses: Sequence[int]) -> int | None:
    """Return the rank that made an attempt hang: it missed the rendezvous, or had to be killed."""
    start = unfinished_start(run_dir.logs, run_dir.ledger.read())
    late = start.late_rank(read_heartbeats(run_dir.heartbeats)) if start else None
    return unresponsive_rank(statuses) if late is None else late


def is_complete(run_dir: RunDir, config: RunConfig) -> bool:
    """Return whether the run has made all steps of `config` and saved the last one."""
    last = last_event(run_dir.ledger.read(), TrainingBegan, TrainingEnded, ResumeFrom)
    is_over = isinstance(last, TrainingEnded) and last.outcome is Outcome.FINISHED
    return is_over and latest_step(run_dir.checkpoints) >= config.optim.steps


def is_done_already(
    run_dir: RunDir, config: RunConfig, from_step: int | None = None, overrides: Sequence[str] = ()
) -> bool:
    """Return whether the directory holds this run, complete. Raises ConfigError for another run.

    `overrides` are already in `config`. False with `from_step`, from which the run trains again.
    """
    if not run_dir.exists():
        run_dir.refuse_other_files()
        return False
    RunDir.open(run_dir.path).refuse_other_run(config, from_step, overrides)
    return from_step is None and is_complete(run_dir, config)
