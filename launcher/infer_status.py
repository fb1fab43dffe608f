"""Infers the state of a run from what its directory shows. Pure, without files or clocks."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from foundation.progress import duration
from pretrain.checkpoint.directory import MARKER, step_directory
from pretrain.checkpoint.marker import latest_step
from pretrain.rundir.events import (
    UNEVENTFUL,
    AttemptEnded,
    Canceled,
    Event,
    Interrupted,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    Submitted,
    TrainingBegan,
)
from pretrain.rundir.heartbeat import HeartbeatRecord, read_heartbeats
from pretrain.rundir.ledger import (
    began_in,
    interruptions,
    is_finished,
    is_stopped,
    last_of,
    time_spent,
)
from pretrain.rundir.lock import Lock
from pretrain.rundir.metrics_file import MetricsSummary, TimeSpent, summarize_file
from pretrain.rundir.run_dir import RunDir

# A rank on another host without a heartbeat for longer may be gone; one on this host is looked up
# by process id.
UNRESPONSIVE_SECONDS = 300.0
_ACTIVITIES = {
    "save": "saving a checkpoint",
    "evaluate": "evaluating",
    "start": "starting",
    "wait": "waiting until the run directory can be written",
}


class State(str, Enum):
    """The state of a run, as `launcher status` shows it."""

    NEW = "new"
    QUEUED = "queued"
    RUNNING = "running"
    REQUEUED = "requeued"
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    CANCELED = "canceled"
    UNRESPONSIVE = "unresponsive"
    FAILED = "failed"
    DONE = "done"
    DAMAGED = "damaged"  # its directory cannot be read
    OTHER = "other settings"  # than the cell of a sweep whose directory it has

    def __str__(self) -> str:
        return self.value


# The run continues without anybody's help.
ACTIVE = (State.RUNNING, State.QUEUED, State.REQUEUED, State.PREEMPTED)


@dataclass(frozen=True)
class Status:
    """A state and the reason for it, for people."""

    state: State
    reason: str = ""
    is_lost: bool = False  # the run ended without writing why
    needs_resume: bool = False  # nobody continues it, although its state would let one expect so


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that the state of a run is inferred from."""

    now: float
    ledger: Sequence[Event]
    metrics: MetricsSummary
    heartbeats: Sequence[HeartbeatRecord]
    locks: Sequence[Lock]
    checkpoint: int | None  # step of the latest one
    checkpoint_time: float | None
    steps: int  # that the run has to make

    @property
    def latest_step(self) -> int:
        """The latest step known, whether or not a checkpoint holds it."""
        steps = (heartbeat.step for heartbeat in self.heartbeats)
        return max([self.metrics.step, self.checkpoint or 0, *steps])

    @property
    def last_seen(self) -> float:
        """When the run last wrote anything: a killed run cannot write when it ended.

        By its own clock: the time of a checkpoint's file may be that of a file server.
        """
        times = [event.time for event in self.ledger[-1:]]
        times += [heartbeat.written for heartbeat in self.heartbeats]
        return max(times, default=self.checkpoint_time or 0.0)

    def time_spent(self, is_running: bool) -> TimeSpent | None:
        """What the run's time went into; None before the first step."""
        end = self.clock if is_running else self.last_seen
        return time_spent(self.metrics, self.ledger, end)

    @property
    def clock(self) -> float:
        """What the time is where the run is: its events have times of that clock, not of ours."""
        is_elsewhere = any(each.is_alive is None for each in self.heartbeats)
        return self.last_seen if is_elsewhere else self.now


def gather(run_dir: RunDir, steps: int) -> Evidence:
    """Read the directory of a run that has to make `steps` steps."""
    latest = latest_step(run_dir.checkpoints) or None
    saved = None
    if latest is not None:
        with contextlib.suppress(FileNotFoundError):  # it is being deleted
            saved = (step_directory(run_dir.checkpoints, latest) / MARKER).stat().st_mtime
    return Evidence(
        now=time.time(),
        ledger=run_dir.ledger.history(),
        metrics=summarize_file(run_dir.metrics),
        heartbeats=read_heartbeats(run_dir.heartbeats),
        locks=run_dir.locks(),
        checkpoint=latest,
        checkpoint_time=saved,
        steps=steps,
    )


def infer_status(evidence: Evidence) -> Status:
    """The state that follows; Slurm may know better, see `run_state.py`."""
    last = last_turn(evidence.ledger)
    is_over = last is not None and not _continues_after(last)
    # A killed rank leaves its heartbeat behind.
    heartbeats = [
        each for each in evidence.heartbeats if last is None or not is_over or each.time > last.time
    ]
    running = Status(State.RUNNING, _activity(last, heartbeats, evidence.now))
    if any(lock.is_held for lock in evidence.locks) or any(each.is_alive for each in heartbeats):
        return running
    # When another host last showed that it works on the run, if its clock is ours.
    times = [each.written for each in heartbeats if each.is_alive is None]
    times += [lock.since for lock in evidence.locks if lock.is_held is None]
    if times and not is_over:
        silence = evidence.now - max(times)
        if abs(silence) < UNRESPONSIVE_SECONDS:  # or a clock is far ahead
            return running
        source = heartbeats[0] if heartbeats else evidence.locks[0]
        hostname = source.hostname.partition(".")[0]
        reason = f"no heartbeat from {hostname} for {duration(silence)}"
        return Status(State.UNRESPONSIVE, reason)
    return _waiting_or_canceled(evidence, last) or _ended(evidence, last)


def last_turn(ledger: Sequence[Event]) -> Event | None:
    """The last event at which an attempt, or a job that makes attempts, began or ended.

    When Slurm ends a job, the supervisor writes that immediately, and its ranks write their last
    events afterwards; those are not turns of the run any more.
    """
    ended = last_of(ledger, JobStarted, JobEnded)  # a later start may have the same number
    start = f"{ended.job}.{ended.restart}" if isinstance(ended, JobEnded) else ""
    timely = [event for event in ledger if not began_in(event, start)]
    kinds = (TrainingBegan, AttemptEnded, JobStarted, JobEnded)
    turns = [event for event in timely if isinstance(event, kinds) or _is_end(event)]
    turn = turns[-1] if turns else None
    of_job = last_of(timely, TrainingBegan, Submitted, JobStarted, JobEnded)
    return of_job if isinstance(of_job, JobEnded) else turn


def _waiting_or_canceled(evidence: Evidence, last: Event | None) -> Status | None:
    order = last_of(evidence.ledger, Canceled)
    job = order.job if order is not None else ""
    own = [event for event in evidence.ledger if not began_in(event, job)]
    began, submitted, canceled = (
        0.0 if event is None else event.time
        for event in (last_of(own, TrainingBegan), last_of(evidence.ledger, Submitted), order)
    )
    is_canceled = Status(State.CANCELED, f"after step {evidence.latest_step:,}")
    if canceled > max(began, submitted):
        return is_canceled
    if submitted > (0.0 if last is None else last.time):
        return Status(State.QUEUED, "submitted, not started since")
    if not isinstance(last, JobEnded):
        return None
    if last.reason is JobEndReason.CANCELED:
        return is_canceled
    if last.reason is JobEndReason.ERROR:
        return Status(State.FAILED, last.cause)
    is_preempted = last.reason is JobEndReason.PREEMPTED
    if last.is_final:
        reason = f"{last.cause} and not requeued; 'launcher resume' continues the run"
        return Status(State.PREEMPTED if is_preempted else State.STOPPED, reason, needs_resume=True)
    if last.reason not in UNEVENTFUL:  # the supervisor has requeued the job, or Slurm has
        return Status(State.PREEMPTED if is_preempted else State.REQUEUED, last.cause)
    return None


def _ended(evidence: Evidence, last: Event | None) -> Status:
    if last is None:
        return Status(State.NEW, "no attempt yet")
    end = next((event for event in reversed(evidence.ledger) if _is_end(event)), None)
    if end is not None and not _continues_after(last):
        if is_finished(end):
            steps = evidence.steps
            if evidence.latest_step >= steps:
                return Status(State.DONE)
            before = f"finished after step {evidence.latest_step:,}"
            return Status(State.STOPPED, f"{before}; the run now has {steps:,} steps")
        if isinstance(end, Interrupted):
            return Status(State.STOPPED, end.description)
        if is_stopped(end):
            step = getattr(end, "step", 0)
            return Status(State.STOPPED, f"stopped on request after step {step:,}")
        if isinstance(end, AttemptEnded) and end.next in (NextAction.GIVE_UP, NextAction.REFUSED):
            return Status(State.FAILED, interruptions(evidence.ledger, False)[-1].description)
    when = datetime.datetime.fromtimestamp(evidence.last_seen).strftime("%Y-%m-%d %H:%M:%S")
    reason = f"its processes ended silently after {when}: they were killed, or the node went down"
    return Status(State.FAILED, reason, is_lost=True)


def _is_end(event: Event) -> bool:
    """Whether an attempt ended here; the end of a phase is no such end."""
    return isinstance(event, AttemptEnded) or is_finished(event) or is_stopped(event)


def _continues_after(turn: Event) -> bool:
    """Whether processes of the run should exist after this event."""
    is_retried = isinstance(turn, AttemptEnded) and turn.next is NextAction.RETRY
    return isinstance(turn, (TrainingBegan, JobStarted)) or is_retried


def _activity(last: Event | None, heartbeats: Sequence[HeartbeatRecord], now: float) -> str:
    if isinstance(last, AttemptEnded) and last.next is NextAction.RETRY:
        return f"restarting: {last.cause}"
    if not heartbeats:
        return "" if isinstance(last, TrainingBegan) else "starting"
    # Ranks wait for each other. One whose file says little is a killed one, of an earlier attempt.
    silence = max(each.seconds_without_progress(now) for each in heartbeats)
    activity = _ACTIVITIES.get(max(heartbeats, key=lambda each: each.time).phase, "")
    if silence > UNRESPONSIVE_SECONDS:
        return f"no progress for {duration(silence)}" + (f" while {activity}" if activity else "")
    return activity
