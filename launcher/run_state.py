"""The state of a run, a row of `launcher status`: read from its directory, joined with what Slurm
knows. `infer_status` is pure, without files or clocks."""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from foundation.errors import UserError, os_error_text, remedy_of
from foundation.ownership import is_of_another_user
from foundation.progress import duration
from foundation.settings import load_config
from launcher.slurm.client import BrokenAnswer, JobRecord, QueuedJob, Slurm
from launcher.slurm.sbatch import Snapshot, own_work_dirs
from pretrain.checkpoint.directory import MARKER, step_directory
from pretrain.checkpoint.verify import latest_step
from pretrain.config.phases import tokens_of_steps
from pretrain.config.run import RunConfig
from pretrain.reporting.results import RunResults, results_of
from pretrain.rundir.attempt_files import AttemptStart, open_start
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
    Mirrored,
    NextAction,
    NodeReplaced,
    NodesUnready,
    Restored,
    Submitted,
    TrainingBegan,
    UnresolvedSpike,
)
from pretrain.rundir.heartbeat import HeartbeatRecord, read_heartbeats
from pretrain.rundir.history import (
    began_in,
    find_events,
    interruptions,
    is_finished,
    is_stopped,
    last_event,
    last_stored,
    num_attempts,
    time_spent,
)
from pretrain.rundir.lock import Lock
from pretrain.rundir.metrics_file import MetricsSummary, TimeSpent, summarize_file
from pretrain.rundir.run_dir import RunDir

_log = logging.getLogger(__name__)

# A rank on another host without a heartbeat for longer may be gone; one on this host is looked up
# by process id.
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
    start: AttemptStart | None = None  # of the latest attempt, until it trains

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
        """When the run last wrote anything, by its own clock: the time of a checkpoint's file may
        be that of a file server."""
        times = [event.time for event in self.ledger[-1:]]
        times += [heartbeat.written for heartbeat in self.heartbeats]
        return max(times, default=self.checkpoint_time or 0.0)

    def time_spent(self, is_running: bool) -> TimeSpent | None:
        """What the run's time went into; None before the first step."""
        end = self.clock if is_running else self.last_seen
        turn = last_event(self.ledger, TrainingBegan, AttemptEnded, JobStarted, JobEnded)
        if is_running and isinstance(turn, TrainingBegan) and self.metrics.time > turn.time:
            end = min(end, self.metrics.time)  # what is not measured yet is no restart
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
    ledger = run_dir.ledger.history()
    return Evidence(
        now=time.time(),
        ledger=ledger,
        start=open_start(run_dir.logs, ledger),
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
    activity = _activity(evidence, last, heartbeats)
    running = Status(State.RUNNING, activity)
    if any(lock.is_held for lock in evidence.locks) or any(each.is_alive for each in heartbeats):
        return running
    # When another host last showed that it works on the run, if its clock is ours.
    times = [each.written for each in heartbeats if each.is_alive is None]
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
            reason = f"the clock of {hostname} is {duration(-silence)} ahead, or it was"
        elif evidence.start:
            reason = f"{activity}; {reason}"
        return Status(State.UNRESPONSIVE, reason)
    return _waiting_or_canceled(evidence, last) or _ended_status(evidence, last)


def last_turn(ledger: Sequence[Event]) -> Event | None:
    """The last event at which an attempt, or a job that makes attempts, began or ended.

    When Slurm ends a job, the supervisor writes that immediately, and its ranks write their last
    events afterwards; those are not turns of the run any more.
    """
    ended = last_event(ledger, JobStarted, JobEnded)  # a later start may have the same number
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
    began, submitted, canceled = (
        0.0 if event is None else event.time
        for event in (last_event(own, TrainingBegan), last_event(evidence.ledger, Submitted), order)
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


def _ended_status(evidence: Evidence, last: Event | None) -> Status:
    if last is None:
        return Status(State.NEW, "no attempt yet")
    end = next((event for event in reversed(evidence.ledger) if _is_end(event)), None)
    if end is not None and not _continues_after(last):
        if is_finished(end):
            steps = evidence.steps
            if evidence.latest_step >= steps:
                if failure := evidence.metrics.failure:  # of a version that called this finished
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
    """Whether an attempt ended here; the end of a phase is no such end."""
    return isinstance(event, AttemptEnded) or is_finished(event) or is_stopped(event)


def _continues_after(turn: Event) -> bool:
    """Whether processes of the run should exist after this event."""
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
    # Ranks wait for each other. One whose file says little is a killed one, of an earlier attempt.
    silence = max(each.seconds_without_progress(now) for each in heartbeats)
    activity = _ACTIVITIES.get(max(heartbeats, key=lambda each: each.time).phase, "")
    if silence > UNRESPONSIVE_SECONDS:
        return f"no progress for {duration(silence)}" + (f" while {activity}" if activity else "")
    return activity


# Accounting's states of earlier starts of a job that is in the queue again.
_REQUEUED = {
    "PREEMPTED": (State.PREEMPTED, "preempted by another job"),
    "NODE_FAIL": (State.REQUEUED, "a node failed"),
    "TIMEOUT": (State.REQUEUED, "reached its time limit"),
    "REQUEUED": (State.REQUEUED, "requeued"),
}
_FAILED = {
    "TIMEOUT": "its job reached the time limit and was not requeued",
    "NODE_FAIL": "a node failed and its job was not requeued",
    "OUT_OF_MEMORY": "its job ran out of host memory",
    "BOOT_FAIL": "its nodes did not boot",
    "DEADLINE": "its job missed its deadline",
}
_UNKNOWN_TIMES = ("N/A", "Unknown", "")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Unknown numbers are None; ages and spans are seconds."""

    name: str
    path: str
    state: State
    reason: str = ""
    is_lost: bool = False  # failed, and nothing of the run has written why
    needs_resume: bool = False  # nobody continues it, although its state would let one expect so
    is_job_open: bool = False  # its last job began and has not written its end
    attempts: int = 0
    ranks: int | None = None
    nodes: tuple[str, ...] = ()
    replaced_nodes: tuple[str, ...] = ()  # those that a spare node replaced, and why
    job: str | None = None  # Slurm's id
    work_dirs: Sequence[str] = ()  # of its jobs
    step: int = 0
    steps: int = 0
    results: RunResults = field(default_factory=RunResults)
    evaluation: Mapping[str, Any] | None = None  # the latest one's line in metrics.jsonl
    time_spent: TimeSpent | None = None
    recent_tokens_per_second: float | None = None  # `speeds`
    seconds_left: float | None = None
    checkpoint: int | None = None
    checkpoint_age: float | None = None
    mirrored: int | None = None  # the latest step that checkpoint.mirror has
    mirror_problem: str = ""  # why it has not the one after
    last_failure: str = ""
    last_failure_age: float | None = None
    interval: int = 0  # of checkpoints, in steps

    @property
    def fraction_done(self) -> float:
        return min(1.0, self.step / self.steps) if self.steps else 0.0

    @property
    def is_done(self) -> bool:
        """Whether all steps are made and there is a valid checkpoint of the last one."""
        return self.state is State.DONE and (self.checkpoint or 0) >= self.steps

    @property
    def unsaved(self) -> str:
        """How far a restart would go back, if that is more than an interval or the run is done."""
        saved = self.checkpoint or 0
        if self.step - saved <= (0 if self.state is State.DONE else self.interval):
            return ""
        latest = f"only step {saved:,}" if saved else "no step"
        return f"{latest} of {self.step:,} is saved"

    @property
    def is_active(self) -> bool:
        """Whether the run is running, or will be without anybody's help."""
        return self.state in ACTIVE and not self.needs_resume

    @property
    def tree(self) -> dict[str, Any]:
        """What is known of the run, as JSON has it."""
        tree = asdict(self)
        results = tree.pop("results")
        return {**tree, **results, "fraction_done": self.fraction_done}

    @property
    def description(self) -> str:
        """The state and, where there is one, the reason."""
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


def is_run(path: Path) -> bool:
    """Whether this directory holds a run, or one that waits for its first attempt."""
    return (
        RunDir(path).exists()
        or Snapshot(path).experiment.is_file()
        or _without_identity(RunDir(path)) is not None
    )


def read_state(path: Path) -> RunState:
    """The state of the run in this directory now; ConfigError if there is none."""
    if (new := _without_identity(RunDir(path))) is not None:
        return new
    config = submitted_config(path) or RunDir.open(path).config
    evidence = gather(RunDir(path), config.optim.steps)
    status = infer_status(evidence)
    is_running = status.state is State.RUNNING
    speed, left = evidence.metrics.recent_tokens_per_second, None
    if speed and is_running:
        left = tokens_of_steps(config, range(evidence.latest_step, config.optim.steps)) / speed
    began = last_event(evidence.ledger, TrainingBegan)
    job = last_event(evidence.ledger, Submitted, JobStarted)
    is_alive = is_running or status.state is State.UNRESPONSIVE
    interrupted = [each for each in interruptions(evidence.ledger, is_alive) if each.is_failure]
    spent = evidence.time_spent(is_running)
    mirrored, upload = last_stored(evidence.ledger), last_event(evidence.ledger, Mirrored, Restored)
    # Without their domains, as Slurm names nodes.
    nodes = {heartbeat.hostname.partition(".")[0] for heartbeat in evidence.heartbeats}
    if not nodes and (started := last_event(evidence.ledger, JobStarted)):
        nodes = set(started.nodes)
    replaced = find_events(evidence.ledger, NodeReplaced)
    now = evidence.clock if is_running else evidence.now
    age = None if evidence.checkpoint_time is None else evidence.now - evidence.checkpoint_time
    return RunState(
        name=config.name,
        path=str(path),
        state=status.state,
        reason=status.reason,
        is_lost=status.is_lost,
        needs_resume=status.needs_resume,
        is_job_open=isinstance(last_event(evidence.ledger, JobStarted, JobEnded), JobStarted),
        attempts=num_attempts(evidence.ledger, is_running),
        ranks=None if began is None else began.world_size,
        nodes=tuple(sorted(nodes)),
        replaced_nodes=tuple(each.description for each in replaced),
        job=None if job is None else job.job,
        work_dirs=own_work_dirs(path, evidence.ledger),
        step=evidence.latest_step,
        steps=evidence.steps,
        results=results_of(config, evidence.metrics, evidence.ledger, spent and spent.goodput),
        evaluation=evidence.metrics.evaluation,
        time_spent=spent,
        recent_tokens_per_second=speed,
        seconds_left=left,
        checkpoint=evidence.checkpoint,
        checkpoint_age=None if age is None else max(0.0, age),
        mirrored=None if mirrored is None else mirrored.step,
        mirror_problem=upload.problem if isinstance(upload, Mirrored) else "",
        last_failure=interrupted[-1].description if interrupted else "",
        last_failure_age=max(0.0, now - interrupted[-1].time) if interrupted else None,
        interval=config.checkpoint.interval,
    )


def _without_identity(run_dir: RunDir) -> RunState | None:
    """The state of a run on this machine that its ranks have yet to make: they start."""
    start = None if run_dir.exists() else open_start(run_dir.logs, [])
    is_here = start and any(lock.is_held for lock in run_dir.locks())
    if not start or not is_here or Snapshot(run_dir.path).experiment.is_file():
        return None
    reason = start.describe(read_heartbeats(run_dir.heartbeats), time.time())
    path = str(run_dir.path)
    return RunState(name=run_dir.path.name, path=path, state=State.RUNNING, reason=reason)


def submitted_config(path: Path) -> RunConfig | None:
    """The settings that a run was submitted with; None once it has begun."""
    submitted = Snapshot(path).experiment
    if submitted.is_file() and not RunDir(path).exists():
        return load_config(RunConfig, submitted)
    return None


def read_states(paths: Sequence[Path]) -> list[RunState]:
    """A state for each directory, in their order; of several, `damaged` if it cannot be read."""
    states = []
    for path in paths:
        try:
            states.append(_read_anything(path))
        except UserError as error:
            if len(paths) == 1:
                raise
            damaged = RunState(name=path.name, path=str(path), state=State.DAMAGED)
            states.append(replace(damaged, reason=str(error)))
    return with_queue(states)


def _read_anything(path: Path) -> RunState:
    """The state of a run; UserError whatever is wrong with its files, so that others are shown."""
    try:  # to open a FIFO or a device could wait forever
        for pattern in ("*", "slurm/*"):
            for file in path.glob(pattern):
                if file.exists() and not file.is_file() and not file.is_dir():
                    raise UserError(f"{file} is not a regular file; remove it")
        return read_state(path)
    except UserError:
        raise
    except OSError as error:
        is_foreign = isinstance(error, PermissionError) and is_of_another_user(path)
        what = f"{path} is another user's run" if is_foreign else remedy_of(error)
        raise UserError(f"{os_error_text(error)}; {what}") from error
    except Exception as error:
        _log.debug("%s", path, exc_info=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} cannot be read ({reason})") from error


def with_queue(states: Sequence[RunState], slurm: Slurm | None = None) -> list[RunState]:
    """The states with what Slurm knows about each run's last job; a warning if it does not
    respond."""
    unknown = [state for state in states if state.state is not State.DONE or state.is_job_open]
    jobs = [state.job for state in unknown if state.job]
    if not jobs:
        return list(states)
    slurm, queue, unreadable = slurm or Slurm(), list[QueuedJob](), set[str]()
    try:
        try:
            queue = slurm.jobs(jobs)
        except BrokenAnswer as error:
            queue = error.whole
            unreadable = {*jobs} - {job.address for job in queue}
            if unreadable:
                names = ", ".join(sorted(unreadable))
                _log.warning("job %s: derived from the directory alone: %s", names, error)
        queued = {job.address: job for job in queue}
        jobs = [job for job in jobs if job not in unreadable]
        # Only about those that the controller has forgotten, or that may have run before.
        records = slurm.records([j for j in jobs if j not in queued or queued[j].is_pending])
    except UserError as error:
        _log.warning("derived from the directories alone: %s", error)
        return list(states)
    joint = list(states)
    for index, state in enumerate(states):
        if state.job and state.job not in unreadable:
            own = [record for record in records if record.address == state.job]
            joint[index] = joined(state, queued.get(state.job), own)
    return joint


def joined(state: RunState, queued: QueuedJob | None, records: Sequence[JobRecord]) -> RunState:
    """The state of a run with what Slurm says about its last job, which wins over heartbeats and
    locks. A job that works in another directory has only the same number."""
    if queued is not None and queued.work_dir not in state.work_dirs:
        queued = None
    records = [each for each in records if each.work_dir in state.work_dirs]
    if queued is not None and queued.is_live:
        if state.state is State.DONE:
            nodes = " ".join(queued.known_nodes) or "its nodes"
            return replace(state, reason=f"its job {state.job} still holds {nodes}")
        return (_pending if queued.is_pending else _running)(state, queued, records)
    ending = (queued.state if queued else records[-1].state if records else "").partition(" ")[0]
    # Ranks also stop, after a checkpoint, when the supervisor of their job is killed.
    was_asked = not state.is_job_open or ending in ("", "COMPLETED")
    if state.state in (State.DONE, State.CANCELED) or (state.state is State.STOPPED and was_asked):
        return state
    return state if state.needs_resume else _ended(state, ending)


def _pending(state: RunState, job: QueuedJob, records: Sequence[JobRecord]) -> RunState:
    reason = f"waiting ({job.reason})"
    if job.is_held:
        reason += f"; 'scontrol release {job.address}' lets it start"
    elif job.start not in _UNKNOWN_TIMES:
        reason += f", expected to start {job.start.replace('T', ' ')}"
    state = replace(state, nodes=(), seconds_left=None)
    if state.state in (State.REQUEUED, State.PREEMPTED):  # the ledger says why
        return replace(state, reason=f"{state.reason}; {reason}")
    if not state.attempts:
        return replace(state, state=State.QUEUED, reason=reason)
    ends = (record.state.split()[0] for record in records)
    latest = ([end for end in ends if end in _REQUEUED] or ["REQUEUED"])[-1]
    requeued, cause = _REQUEUED[latest]
    return replace(state, state=requeued, reason=f"{cause}; {reason}")


def _running(state: RunState, job: QueuedJob, _: Sequence[JobRecord]) -> RunState:
    was, nodes = state.state, state.nodes or tuple(job.known_nodes)
    state = replace(state, state=State.RUNNING, nodes=nodes)
    if job.state != "RUNNING":
        return replace(state, reason=f"its job is {job.state.lower()}")
    if was in (State.RUNNING, State.UNRESPONSIVE):
        return state
    since = f" since {job.start.replace('T', ' ')}" if job.start not in _UNKNOWN_TIMES else ""
    return replace(state, reason=f"starting{since}", attempts=state.attempts + 1)


def _ended(state: RunState, ending: str) -> RunState:
    state = replace(state, seconds_left=None)
    if ending == "CANCELLED":
        reason = f"after step {state.step:,}; 'launcher resume' continues the run"
        return replace(state, state=State.CANCELED, reason=reason)
    if not ending and state.state is State.QUEUED:
        return replace(state, state=State.CANCELED, reason="its job left the queue unstarted")
    if ending == "PREEMPTED":
        reason = "preempted and not requeued; 'launcher resume' continues the run"
        return replace(state, state=State.PREEMPTED, reason=reason, needs_resume=True)
    if state.state is State.FAILED and not state.is_lost:
        return state
    if ending == "FAILED" and state.state is State.QUEUED:
        reason = "its job failed before its supervisor began, as if a node could not read the run"
        if not RunDir(Path(state.path)).logs.is_dir():
            reason = "its job could not write its log: RUN/logs is gone"
        elif any(RunDir(Path(state.path)).logs.glob("slurm-*.log")):
            reason = "its job failed before its supervisor began: 'launcher logs RUN --errors'"
        reason += "; 'launcher resume' submits it again"
        return replace(state, state=State.FAILED, reason=reason)
    if state.is_job_open and ending == "FAILED":
        reason = "its job failed and could not write why: it was killed, or storage failed"
        return replace(state, state=State.FAILED, reason=reason)
    detail = f" ({ending.lower()})" if ending else ": it is unknown to Slurm"
    reason = _FAILED.get(ending, f"its job has ended{detail}")
    if state.state in (State.REQUEUED, State.PREEMPTED):  # the ledger knows why
        reason = f"{state.reason}; {reason}; 'launcher resume' continues the run"
    return replace(state, state=State.FAILED, reason=reason)
