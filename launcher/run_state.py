"""The state of a run, a row of `launcher status`: from its directory, corrected by Slurm's data."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from foundation.errors import UserError, os_error_text, remedy_of
from foundation.ownership import is_of_another_user
from foundation.settings import load_config
from launcher.run_status import ACTIVE, State, gather, infer_status
from launcher.slurm.client import BrokenAnswer, JobRecord, QueuedJob, Slurm
from launcher.slurm.sbatch import Snapshot, own_work_dirs
from pretrain.config.phases import tokens_of_steps
from pretrain.config.run import RunConfig
from pretrain.reporting.results import RunResults, results_of
from pretrain.rundir.attempt_files import unfinished_start
from pretrain.rundir.events import (
    JobEnded,
    JobStarted,
    Mirrored,
    NodeReplaced,
    Restored,
    Submitted,
    TrainingBegan,
)
from pretrain.rundir.heartbeat import read_heartbeats
from pretrain.rundir.history import (
    find_events,
    interruptions,
    last_event,
    last_stored,
    num_attempts,
)
from pretrain.rundir.metrics_file import TimeSpent
from pretrain.rundir.run_dir import RunDir

_log = logging.getLogger(__name__)
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
    """The state of a run. Unknown numbers are None; times are in seconds."""

    name: str
    path: str
    state: State
    reason: str = ""
    is_lost: bool = False  # failed, and no process of the run has recorded why
    needs_resume: bool = False  # only `launcher resume` continues it, though its state looks active
    is_job_open: bool = False  # the ledger has the start of its last job, but not the end
    attempts: int = 0
    ranks: int | None = None
    nodes: tuple[str, ...] = ()
    replaced_nodes: tuple[str, ...] = ()  # a sentence for each: its spare node, and why
    job: str | None = None  # Slurm's id
    work_dirs: Sequence[str] = ()  # of the run's jobs
    step: int = 0
    steps: int = 0
    results: RunResults = field(default_factory=RunResults)
    evaluation: Mapping[str, Any] | None = None  # the line of the latest in metrics.jsonl
    time_spent: TimeSpent | None = None
    recent_tokens_per_second: float | None = None  # `RECENT_SPEED` in `metric_names`
    seconds_left: float | None = None
    checkpoint: int | None = None
    checkpoint_age: float | None = None
    mirrored: int | None = None  # the latest step that checkpoint.mirror has
    mirror_problem: str = ""  # why the last upload failed
    last_failure: str = ""
    last_failure_age: float | None = None
    interval: int = 0  # steps between two checkpoints

    @property
    def fraction_done(self) -> float:
        return min(1.0, self.step / self.steps) if self.steps else 0.0

    @property
    def is_done(self) -> bool:
        """Whether all steps are made and there is a valid checkpoint of the last one."""
        return self.state is State.DONE and (self.checkpoint or 0) >= self.steps

    @property
    def unsaved(self) -> str:
        """How far a restart would go back; '' if that is normal.

        Normal is up to one interval of checkpoints; once the run is done, only 0 steps.
        """
        saved = self.checkpoint or 0
        if self.step - saved <= (0 if self.state is State.DONE else self.interval):
            return ""
        latest = f"only step {saved:,}" if saved else "no step"
        return f"{latest} of {self.step:,} is saved"

    @property
    def is_active(self) -> bool:
        """Whether the run is running, or will be without a user's command."""
        return self.state in ACTIVE and not self.needs_resume

    @property
    def tree(self) -> dict[str, Any]:
        """The fields as `launcher status --json` prints them."""
        tree = asdict(self)
        results = tree.pop("results")
        return {**tree, **results, "fraction_done": self.fraction_done}

    @property
    def description(self) -> str:
        """The state and, if there is one, the reason."""
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


def is_run(path: Path) -> bool:
    """Return whether this directory holds a run, also one that waits for its first attempt."""
    return (
        RunDir(path).exists()
        or Snapshot(path).experiment.is_file()
        or _without_identity(RunDir(path)) is not None
    )


def read_state(path: Path) -> RunState:
    """Return the present state of the run in this directory; ConfigError if there is no run."""
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
    failures = [one for one in interruptions(evidence.ledger, is_alive) if one.is_failure]
    spent = evidence.time_spent(is_running)
    mirrored, upload = last_stored(evidence.ledger), last_event(evidence.ledger, Mirrored, Restored)
    # Slurm's names of nodes have no domains.
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
        replaced_nodes=tuple(event.description for event in replaced),
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
        last_failure=failures[-1].description if failures else "",
        last_failure_age=max(0.0, now - failures[-1].time) if failures else None,
        interval=config.checkpoint.interval,
    )


def _without_identity(run_dir: RunDir) -> RunState | None:
    """Return the state of a run that is starting on this machine; None for any other.

    Its ranks have not written run.json yet.
    """
    start = None if run_dir.exists() else unfinished_start(run_dir.logs, [])
    is_here = start and any(lock.is_held for lock in run_dir.locks())
    if not start or not is_here or Snapshot(run_dir.path).experiment.is_file():
        return None
    reason = start.describe(read_heartbeats(run_dir.heartbeats), time.time())
    path = str(run_dir.path)
    return RunState(name=run_dir.path.name, path=path, state=State.RUNNING, reason=reason)


def submitted_config(path: Path) -> RunConfig | None:
    """Return the settings that a run was submitted with; None once the run has begun."""
    submitted = Snapshot(path).experiment
    if submitted.is_file() and not RunDir(path).exists():
        return load_config(RunConfig, submitted)
    return None


def read_states(paths: Sequence[Path]) -> list[RunState]:
    """Return the state of each directory, in order.

    An unreadable directory gets the state `unreadable`; UserError if it is the only one.
    """
    states = []
    for path in paths:
        try:
            states.append(_read_anything(path))
        except UserError as error:
            if len(paths) == 1:
                raise
            unreadable = RunState(name=path.name, path=str(path), state=State.UNREADABLE)
            states.append(replace(unreadable, reason=str(error)))
    return with_queue(states)


def _read_anything(path: Path) -> RunState:
    """Return the state of a run; UserError for anything wrong with its files.

    One damaged run must not keep `launcher status` from showing the others.
    """
    try:
        # Opening a FIFO or a device could block forever, so check for regular files first.
        for pattern in ("*", "slurm/*"):
            for file in path.glob(pattern):
                if file.exists() and not file.is_file() and not file.is_dir():
                    raise UserError(f"{file} is not a regular file; remove it")
        return read_state(path)
    except UserError:
        raise
    except OSError as error:
        is_foreign = isinstance(error, PermissionError) and is_of_another_user(path)
        advice = f"{path} is another user's run" if is_foreign else remedy_of(error)
        raise UserError(f"{os_error_text(error)}; {advice}") from error
    except Exception as error:
        _log.debug("%s", path, exc_info=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} cannot be read ({reason})") from error


def with_queue(states: Sequence[RunState], slurm: Slurm | None = None) -> list[RunState]:
    """Return the states, corrected by Slurm's data on each run's last job.

    If Slurm does not respond, warn and return them unchanged.
    """
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
                _log.warning("job %s: state taken from the run directory alone: %s", names, error)
        queued = {job.address: job for job in queue}
        jobs = [job for job in jobs if job not in unreadable]
        # Accounting is slower than the controller. Ask it only about jobs that the controller has
        # forgotten, and about pending ones, whose earlier starts it may have.
        records = slurm.records([j for j in jobs if j not in queued or queued[j].is_pending])
    except UserError as error:
        _log.warning("states taken from the run directories alone: %s", error)
        return list(states)
    joint = list(states)
    for index, state in enumerate(states):
        if state.job and state.job not in unreadable:
            own = [record for record in records if record.address == state.job]
            joint[index] = joined(state, queued.get(state.job), own)
    return joint


def joined(state: RunState, queued: QueuedJob | None, records: Sequence[JobRecord]) -> RunState:
    """Return the state, corrected by Slurm's data on the run's last job.

    Slurm's data is taken over heartbeats and locks. A job with another working directory is not the
    run's: it only has the same number.
    """
    if queued is not None and queued.work_dir not in state.work_dirs:
        queued = None
    records = [record for record in records if record.work_dir in state.work_dirs]
    if queued is not None and queued.is_live:
        if state.state is State.DONE:
            nodes = " ".join(queued.known_nodes) or "its nodes"
            return replace(state, reason=f"its job {state.job} still holds {nodes}")
        if queued.is_pending:
            return _pending(state, queued, records)
        return _running(state, queued)
    ending = (queued.state if queued else records[-1].state if records else "").partition(" ")[0]
    # The state `stopped` means a user's request only if the job has ended regularly: ranks also
    # save and stop when their supervisor is killed.
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


def _running(state: RunState, job: QueuedJob) -> RunState:
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
        reason = "its job failed before its supervisor began: can its nodes read the run directory?"
        if not RunDir(Path(state.path)).logs.is_dir():
            reason = "its job could not write its log: RUN/logs is gone"
        elif any(RunDir(Path(state.path)).logs.glob("slurm-*.log")):
            reason = "its job failed before its supervisor began, see 'launcher logs RUN --errors'"
        reason += "; 'launcher resume' submits it again"
        return replace(state, state=State.FAILED, reason=reason)
    if state.is_job_open and ending == "FAILED":
        reason = "its job failed and could not write why: it was killed, or storage failed"
        return replace(state, state=State.FAILED, reason=reason)
    detail = f" ({ending.lower()})" if ending else ": it is unknown to Slurm"
    reason = _FAILED.get(ending, f"its job has ended{detail}")
    if state.state in (State.REQUEUED, State.PREEMPTED):  # the ledger says why
        reason = f"{state.reason}; {reason}; 'launcher resume' continues the run"
    return replace(state, state=State.FAILED, reason=reason)
