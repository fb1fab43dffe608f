"""The status of a run, from its directory alone; run_state.py corrects it by Slurm's data.
`infer_status` is pure: it reads no files or clocks."""

import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from foundation.progress import duration
from pretrain.checkpoint.directory import MARKER, step_directory
from pretrain.checkpoint.verify import latest_step
from pretrain.rundir.attempt_files import AttemptStart, unfinished_start
from pretrain.rundir.events import (
    UNEVENTFUL,
    AttemptEnded,
    Canceled,
    Event,
    GaveUp,
    Interrupted,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    NodesUnready,
    Submitted,
    TrainingBegan,
    UnresolvedSpike,
)
from pretrain.rundir.heartbeat import HeartbeatRecord, read_heartbeats
from pretrain.rundir.history import (
    STARTS_AND_ENDS,
    began_in,
    find_events,
    interruptions,
    is_finished,
    is_stopped,
    last_event,
    time_spent,
)
from pretrain.rundir.lock import Lock
from pretrain.rundir.metrics_file import MetricsSummary, TimeSpent, summarize_file
from pretrain.rundir.run_dir import RunDir

# After this long without a heartbeat, a rank on another host may be gone. A rank on this host is
# looked up by its process id.
UNRESPONSIVE_SECONDS = 300.0
_ACTIVITIES = {
    "save": "saving a checkpoint",
    "evaluate": "evaluating",
    "launch": "starting",
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
    UNREADABLE = "unreadable"  # its directory, or a package that its settings need
    OTHER = "other settings"  # the directory of a sweep's cell has a run of other settings

    def __str__(self) -> str:
        return self.value


# States in which the run continues by itself.
ACTIVE = (State.RUNNING, State.QUEUED, State.REQUEUED, State.PREEMPTED)


@dataclass(frozen=True)
class Status:
    """A state and the reason for it, for people."""

    state: State
    reason: str = ""
    is_lost: bool = False  # the run ended without writing why
    needs_resume: bool = False  # only `launcher resume` continues it, though its state looks active


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that the status of a run is inferred from."""

    now: float
    ledger: Sequence[Event]
    metrics: MetricsSummary
    heartbeats: Sequence[HeartbeatRecord]
    locks: Sequence[Lock]
    checkpoint: int | None  # step of the latest
    checkpoint_time: float | None
    steps: int  # all that the run has to make
    start: AttemptStart | None = None  # how far the latest attempt is; None once it trains

    @property
    def unready_nodes(self) -> NodesUnready | None:
        """The nodes that the supervisor waits for; None once an attempt has started."""
        latest = self.ledger[-1] if self.ledger else None
        is_over = latest and self.start and self.start.time > latest.time
        return latest if isinstance(latest, NodesUnready) and not is_over else None

    @property
    def latest_step(self) -> int:
        """The latest step known, whether or not a checkpoint holds it."""
        steps = (heartbeat.step for heartbeat in self.heartbeats)
        return max([self.metrics.step, self.checkpoint or 0, *steps])

    @property
    def last_seen(self) -> float:
        """When the run last wrote an event or heartbeat, by its own clock. Without any, the time of
        its checkpoint, which may be by a file server's clock."""
        times = [event.time for event in self.ledger[-1:]]
        times += [heartbeat.written for heartbeat in self.heartbeats]
        return max(times, default=self.checkpoint_time or 0.0)

    def time_spent(self, is_running: bool) -> TimeSpent | None:
        """What the run's time went into; None before the first step."""
        end = self.clock if is_running else self.last_seen
        turn = last_event(self.ledger, TrainingBegan, AttemptEnded, JobStarted, JobEnded)
        if is_running and isinstance(turn, TrainingBegan) and self.metrics.time > turn.time:
            end = min(end, self.metrics.time)  # steps that are not measured yet are no restart
        return time_spent(self.metrics, self.ledger, end)

    @property
    def clock(self) -> float:
        """The present time by the clock of the run's host, which the times of its events follow."""
        is_elsewhere = any(heartbeat.is_alive is None for heartbeat in self.heartbeats)
        return self.last_seen if is_elsewhere else self.now


def gather(run_dir: RunDir, steps: int) -> Evidence:
    """Return what the directory of a run that has to make `steps` steps shows now."""
    latest = latest_step(run_dir.checkpoints) or None
    saved = None
    if latest is not None:
        with contextlib.suppress(FileNotFoundError):  # it is being deleted
            saved = (step_directory(run_dir.checkpoints, latest) / MARKER).stat().st_mtime
    ledger = run_dir.ledger.history()
    return Evidence(
        now=time.time(),
        ledger=ledger,
        start=unfinished_start(run_dir.logs, ledger),
        metrics=summarize_file(run_dir.metrics),
        heartbeats=read_heartbeats(run_dir.heartbeats),
        locks=run_dir.locks(),
        checkpoint=latest,
        checkpoint_time=saved,
        steps=steps,
    )


def infer_status(evidence: Evidence) -> Status:
    """Return the status that follows from the evidence."""
    last = last_turn(evidence.ledger, evidence.latest_step >= evidence.steps)
    is_over = last is not None and not _continues_after(last)
    # A killed rank leaves its heartbeat: after the run's end, an older one does not count.
    heartbeats = [
        heartbeat
        for heartbeat in evidence.heartbeats
        if last is None or not is_over or heartbeat.time > last.time
    ]
    activity = _activity(evidence, last, heartbeats)
    running = Status(State.RUNNING, activity)
    if any(lock.is_held for lock in evidence.locks) or any(h.is_alive for h in heartbeats):
        return running
    # When another host last showed that it works on the run, if its clock agrees with ours.
    times = [heartbeat.written for heartbeat in heartbeats if heartbeat.is_alive is None]
    times += [lock.since for lock in evidence.locks if lock.is_held is None]
    if times and not is_over:
        silence = evidence.now - max(times)
        if abs(silence) < UNRESPONSIVE_SECONDS:
            return running
        source = heartbeats[0] if heartbeats else evidence.locks[0]
        hostname = source.hostname.partition(".")[0]
        reason = f"no heartbeat from {hostname} for {duration(silence)}"
        if evidence.unready_nodes:
            reason = activity
        elif silence < 0:
            reason = f"the clock of {hostname} is {duration(-silence)} ahead of ours, or was"
        elif evidence.start:
            reason = f"{activity}; {reason}"
        return Status(State.UNRESPONSIVE, reason)
    return _waiting_or_canceled(evidence, last) or _ended_status(evidence, last)


def last_turn(ledger: Sequence[Event], has_all_steps: bool) -> Event | None:
    """Return the last event at which an attempt, or a job that makes attempts, began or ended.

    When Slurm ends a job, the supervisor writes that immediately, and its ranks write their last
    events afterwards. These are no turns of the run, unless it has made all steps.
    """
    trained = last_event(ledger, *STARTS_AND_ENDS)
    if has_all_steps and trained is not None and is_finished(trained):
        return trained  # a job that starts afterwards has nothing to do
    ended = last_event(ledger, JobStarted, JobEnded)  # a new start may have an ended one's number
    start = f"{ended.job}.{ended.restart}" if isinstance(ended, JobEnded) else ""
    timely = [event for event in ledger if not began_in(event, start)]
    kinds = (TrainingBegan, AttemptEnded, JobStarted, JobEnded)
    turns = [event for event in timely if isinstance(event, kinds) or _is_end(event)]
    turn = turns[-1] if turns else None
    of_job = last_event(timely, TrainingBegan, Submitted, JobStarted, JobEnded)
    return of_job if isinstance(of_job, JobEnded) else turn


def _waiting_or_canceled(evidence: Evidence, last: Event | None) -> Status | None:
    order = last_event(evidence.ledger, Canceled)
    job = order.job if order is not None else ""
    own = [event for event in evidence.ledger if not began_in(event, job)]
    submission = last_event(evidence.ledger, Submitted)
    began, submitted, canceled = (
        0.0 if event is None else event.time
        for event in (last_event(own, TrainingBegan), submission, order)
    )
    # A job with nothing left to do may end before `launcher resume` has recorded its submission.
    finished = {
        end.job
        for end in find_events(evidence.ledger, JobEnded)
        if end.reason is JobEndReason.FINISHED
    }
    is_waiting = submission is not None and submission.job not in finished
    is_canceled = Status(State.CANCELED, f"after step {evidence.latest_step:,}")
    if canceled > max(began, submitted):
        return is_canceled
    if is_waiting and submitted > (0.0 if last is None else last.time):
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


def _ended_status(evidence: Evidence, last: Event | None) -> Status:
    if last is None:
        return Status(State.NEW, "no attempt yet")
    end = next((event for event in reversed(evidence.ledger) if _is_end(event)), None)
    if end is not None and not _continues_after(last):
        if is_finished(end):
            steps = evidence.steps
            if evidence.latest_step >= steps:
                if failure := evidence.metrics.failure:  # old versions recorded it as finished
                    return Status(State.FAILED, failure)
                spike = last_event(evidence.ledger, TrainingBegan, UnresolvedSpike)
                is_spike = isinstance(spike, UnresolvedSpike)
                return Status(State.DONE, spike.description if is_spike else "")
            before = f"finished after step {evidence.latest_step:,}"
            return Status(State.STOPPED, f"{before}; the run now has {steps:,} steps")
        if isinstance(end, Interrupted):
            return Status(State.STOPPED, end.description)
        if is_stopped(end):
            step = getattr(end, "step", 0)
            return Status(State.STOPPED, f"stopped on request after step {step:,}")
        if isinstance(end, AttemptEnded) and end.next in (NextAction.GIVE_UP, NextAction.REFUSED):
            return Status(State.FAILED, interruptions(evidence.ledger, False)[-1].description)
    if isinstance(last_event(evidence.ledger, TrainingBegan, GaveUp), GaveUp):
        return Status(State.FAILED, interruptions(evidence.ledger, False)[-1].description)
    when = datetime.datetime.fromtimestamp(evidence.last_seen).strftime("%Y-%m-%d %H:%M:%S")
    reason = f"its processes ended silently after {when}: they were killed, or the node went down"
    return Status(State.FAILED, reason, is_lost=True)


def _is_end(event: Event) -> bool:
    """Return whether an attempt, not only a phase, ended here."""
    return isinstance(event, AttemptEnded) or is_finished(event) or is_stopped(event)


def _continues_after(turn: Event) -> bool:
    """Return whether processes of the run should exist after this event."""
    is_retried = isinstance(turn, AttemptEnded) and turn.next is NextAction.RETRY
    return isinstance(turn, (TrainingBegan, JobStarted)) or is_retried


def _activity(evidence: Evidence, last: Event | None, heartbeats: Sequence[HeartbeatRecord]) -> str:
    now = evidence.now
    if unready := evidence.unready_nodes:
        return unready.description
    if evidence.start:
        return evidence.start.describe(evidence.heartbeats, now)
    if isinstance(last, AttemptEnded) and last.next is NextAction.RETRY:
        return f"restarting: {last.cause}"
    if not heartbeats:
        since = f" for {duration(max(0.0, now - last.time))}" if last else ""
        return "" if isinstance(last, TrainingBegan) else f"starting{since}"
    # Ranks wait for each other, so the longest silence counts.
    silence = max(heartbeat.seconds_without_progress(now) for heartbeat in heartbeats)
    activity = _ACTIVITIES.get(max(heartbeats, key=lambda one: one.time).phase, "")
    if silence > UNRESPONSIVE_SECONDS:
        return f"no progress for {duration(silence)}" + (f" while {activity}" if activity else "")
    return activity
