"""The state of a run, a row of `launcher status`: read from its directory, joined with what Slurm
knows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from foundation.errors import UserError, os_error_text, remedy_of
from foundation.files import is_of_another_user
from foundation.settings import load_config
from launcher.infer_status import ACTIVE, State, gather, infer_status
from launcher.slurm import client as slurm
from launcher.slurm.client import JobRecord, QueuedJob
from launcher.slurm.sbatch import Snapshot
from pretrain.config.run import RunConfig, tokens_of_steps
from pretrain.reporting.results import RunResults, results_of
from pretrain.rundir.events import (
    JobEnded,
    JobStarted,
    Mirrored,
    NodeReplaced,
    Restored,
    Submitted,
    TrainingBegan,
)
from pretrain.rundir.ledger import (
    events_of,
    interruptions,
    job_names,
    last_of,
    last_stored,
    num_attempts,
)
from pretrain.rundir.metrics_file import TimeSpent
from pretrain.rundir.run_dir import RunDir

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
_log = logging.getLogger(__name__)


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
    job_names: Sequence[str] = ()  # under which it was submitted
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
        """How far a restart would go back, if that is more than an interval or the run is done.

        Measurements outlive checkpoints: those may be refused, or lost.
        """
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
    """Whether this directory holds a run, or one that was submitted and waits for its first
    attempt."""
    return RunDir(path).exists() or Snapshot(path).experiment.is_file()


def read_state(path: Path) -> RunState:
    """The state of the run in this directory now; ConfigError if there is none."""
    config = submitted_config(path) or RunDir.open(path).config
    evidence = gather(RunDir(path), config.optim.steps)
    status = infer_status(evidence)
    is_running = status.state is State.RUNNING
    speed, left = evidence.metrics.recent_tokens_per_second, None
    if speed and is_running:
        left = tokens_of_steps(config, range(evidence.latest_step, config.optim.steps)) / speed
    began = last_of(evidence.ledger, TrainingBegan)
    job = last_of(evidence.ledger, Submitted, JobStarted)
    interrupted = interruptions(evidence.ledger, is_running or status.state is State.UNRESPONSIVE)
    spent = evidence.time_spent(is_running)
    mirrored, upload = last_stored(evidence.ledger), last_of(evidence.ledger, Mirrored, Restored)
    # Without their domains, as Slurm names nodes.
    nodes = {heartbeat.hostname.partition(".")[0] for heartbeat in evidence.heartbeats}
    if not nodes and (started := last_of(evidence.ledger, JobStarted)):
        nodes = set(started.nodes)
    now = evidence.clock if is_running else evidence.now
    age = None if evidence.checkpoint_time is None else evidence.now - evidence.checkpoint_time
    return RunState(
        name=config.name,
        path=str(path),
        state=status.state,
        reason=status.reason,
        is_lost=status.is_lost,
        needs_resume=status.needs_resume,
        is_job_open=isinstance(last_of(evidence.ledger, JobStarted, JobEnded), JobStarted),
        attempts=num_attempts(evidence.ledger, is_running),
        ranks=None if began is None else began.world_size,
        nodes=tuple(sorted(nodes)),
        replaced_nodes=tuple(
            event.description for event in events_of(evidence.ledger, NodeReplaced)
        ),
        job=None if job is None else job.job,
        job_names=job_names(evidence.ledger),
        step=evidence.latest_step,
        steps=evidence.steps,
        results=results_of(
            config, evidence.metrics, evidence.ledger, None if spent is None else spent.goodput
        ),
        evaluation=evidence.metrics.evaluation,
        time_spent=spent,
        recent_tokens_per_second=speed,
        seconds_left=left,
        checkpoint=evidence.checkpoint,
        checkpoint_age=None if age is None else max(0.0, age),
        mirrored=None if mirrored is None else mirrored.step,
        mirror_problem=upload.problem if isinstance(upload, Mirrored) else "",
        last_failure=interrupted[-1].description if interrupted else "",
        last_failure_age=now - interrupted[-1].time if interrupted else None,
        interval=config.checkpoint.interval,
    )


def submitted_config(path: Path) -> RunConfig | None:
    """The settings that a run was submitted with; None once it has begun."""
    submitted = Snapshot(path).experiment
    if submitted.is_file() and not RunDir(path).exists():
        return load_config(RunConfig, submitted)
    return None


def read_states(paths: Sequence[Path]) -> list[RunState]:
    """A state for each directory, in their order.

    Of several, one that cannot be read has the state `damaged`.
    """
    states = []
    for path in paths:
        try:
            states.append(_read_anything(path))
        except UserError as error:
            if len(paths) == 1:
                raise
            damaged = RunState(
                name=path.name, path=str(path), state=State.DAMAGED, reason=str(error)
            )
            states.append(damaged)
    return with_queue(states)


def _read_anything(path: Path) -> RunState:
    """The state of a run; UserError whatever is wrong with its files, so that others are shown.

    To open a FIFO or a device could wait forever.
    """
    try:
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


def with_queue(states: Sequence[RunState]) -> list[RunState]:
    """The states with what Slurm knows about each run's last job.

    If Slurm does not respond, a warning says so.
    """
    jobs = [
        state.job
        for state in states
        if state.job and (state.state is not State.DONE or state.is_job_open)
    ]
    if not jobs:
        return list(states)
    try:
        queued = {job.address: job for job in slurm.jobs(jobs)}
        # Only about those that the controller has forgotten, or that may have run before.
        records = slurm.records([j for j in jobs if j not in queued or queued[j].is_pending])
    except UserError as error:
        _log.warning("derived from the directories alone: %s", error)
        return list(states)
    return [
        joined(
            state,
            queued.get(state.job),
            [record for record in records if record.address == state.job],
        )
        if state.job
        else state
        for state in states
    ]


def joined(state: RunState, queued: QueuedJob | None, records: Sequence[JobRecord]) -> RunState:
    """The state of a run with what Slurm says about its last job, which wins over heartbeats and
    locks. A job of another name has only the same number."""
    if queued is not None and queued.name not in state.job_names:
        queued = None
    records = [each for each in records if each.name in state.job_names]
    if queued is not None and queued.is_live:
        if state.state is State.DONE:
            nodes = " ".join(slurm.node_names(queued.nodes)) or "its nodes"
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
    was, nodes = state.state, state.nodes or tuple(slurm.node_names(job.nodes))
    state = replace(state, state=State.RUNNING, nodes=nodes)
    if job.state != "RUNNING":
        return replace(state, reason=f"its job is {job.state.lower()}")
    if was in (State.RUNNING, State.UNRESPONSIVE):
        return state
    return replace(state, reason="starting", attempts=state.attempts + 1)


def _ended(state: RunState, ending: str) -> RunState:
    state = replace(state, seconds_left=None)
    if ending == "CANCELLED":
        return replace(state, state=State.CANCELED, reason=f"after step {state.step:,}")
    if not ending and state.state is State.QUEUED:
        return replace(state, state=State.CANCELED, reason="its job left the queue unstarted")
    if ending == "PREEMPTED":
        reason = "preempted and not requeued; 'launcher resume' continues the run"
        return replace(state, state=State.PREEMPTED, reason=reason, needs_resume=True)
    if state.state is State.FAILED and not state.is_lost:
        return state
    if ending == "FAILED" and state.state is State.QUEUED:
        reason = "its job failed before its supervisor began; see 'launcher logs RUN --errors'"
        return replace(state, state=State.FAILED, reason=reason)
    if state.is_job_open and ending == "FAILED":
        reason = "its job failed and could not write why: it was killed, or storage failed"
        return replace(state, state=State.FAILED, reason=reason)
    detail = f" ({ending.lower()})" if ending else ": it is unknown to Slurm"
    reason = _FAILED.get(ending, f"its job has ended{detail}")
    return replace(state, state=State.FAILED, reason=reason)
