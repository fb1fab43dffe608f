"""What Slurm knows about runs, joined with the states read from their directories."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.errors import UserError, os_error_text, remedy_of
from foundation.files import is_of_another_user
from launcher.slurm import client as slurm
from launcher.slurm.client import JobRecord, QueuedJob
from launcher.status.infer_status import State
from launcher.status.run_state import RunState, read_state

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
class Queue:
    """Slurm's answers about some jobs, by id: 17, or 17_3 for a task of an array."""

    jobs: Mapping[str, QueuedJob]
    records: Mapping[str, Sequence[JobRecord]]


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
        queue = ask(jobs)
    except UserError as error:
        _log.warning("derived from the directories alone: %s", error)
        return list(states)
    return [joined(state, state.job, queue) if state.job else state for state in states]


def ask(jobs: Sequence[str]) -> Queue:
    """Ask Slurm about all these jobs; UserError if there is no Slurm here or it does not respond.

    Accounting is asked only about jobs that the controller has forgotten, or that may have run
    before.
    """
    queued = {job.address: job for job in slurm.jobs(jobs)}
    unclear = [job for job in jobs if job not in queued or queued[job].is_pending]
    records: dict[str, list[JobRecord]] = {}
    for record in slurm.records(unclear):
        records.setdefault(record.array_task, []).append(record)
    return Queue(jobs=queued, records=records)


def joined(state: RunState, job: str, queue: Queue) -> RunState:
    """The state of a run whose last job is `job`.

    What Slurm says about the job wins over heartbeats and locks. A job of another name has only the
    same number.
    """
    queued = queue.jobs.get(job)
    if queued is not None and queued.name not in state.job_names:
        queued = None
    records = [each for each in queue.records.get(job, ()) if each.name in state.job_names]
    if queued is not None and queued.is_live:
        if state.state is State.DONE:
            nodes = " ".join(slurm.node_names(queued.nodes)) if queued.nodes else "its nodes"
            return replace(state, reason=f"its job {job} still holds {nodes}")
        if queued.is_pending:
            return _pending(state, queued, records)
        return _running(state, queued)
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


def _running(state: RunState, job: QueuedJob) -> RunState:
    nodes = state.nodes or (tuple(slurm.node_names(job.nodes)) if job.nodes else ())
    if job.state != "RUNNING":
        reason = f"its job is {job.state.lower()}"
        return replace(state, state=State.RUNNING, reason=reason, nodes=nodes)
    if state.state in (State.RUNNING, State.UNRESPONSIVE):
        return replace(state, state=State.RUNNING, nodes=nodes)
    attempts = state.attempts + 1
    return replace(state, state=State.RUNNING, reason="starting", nodes=nodes, attempts=attempts)


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
