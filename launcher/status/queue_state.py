"""What Slurm knows about runs, joined with what their directories show."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.errors import UserError
from launcher.slurm import client as slurm
from launcher.slurm.client import JobRecord, QueuedJob
from launcher.status.run_state import RunState, read_state
from launcher.status.run_status import LOST

_REASONS = {
    "Resources": "waits for nodes to become free",
    "Priority": "others go first",
    "Dependency": "waits for another job",
    "BeginTime": "may not begin yet",
    "JobArrayTaskLimit": "waits for other cells of its sweep",
    "JobHeldUser": "held by its user; 'scontrol release' lets it go",
    "JobHeldAdmin": "held by an administrator, or after a failed start",
    "PartitionDown": "its partition is down",
    "PartitionTimeLimit": "asks for more time than its partition gives",
    "PartitionNodeLimit": "asks for more nodes than its partition has",
    "ReqNodeNotAvail": "the nodes it needs are down or reserved",
}
_BROUGHT_BACK = {
    "PREEMPTED": ("preempted", "made room for another job"),
    "NODE_FAIL": ("requeued", "a node failed"),
    "TIMEOUT": ("requeued", "reached its time limit"),
    "REQUEUED": ("requeued", "went back into the queue"),
}
_ENDED_BADLY = {
    "TIMEOUT": "its job reached the time limit and was not requeued",
    "NODE_FAIL": "a node failed and its job was not requeued",
    "OUT_OF_MEMORY": "its job ran out of memory",
    "BOOT_FAIL": "its nodes did not start",
    "DEADLINE": "its job missed its deadline",
    "PREEMPTED": "made room for another job and was not requeued",
}
_FINAL = ("done",)  # nothing that Slurm could add
_UNKNOWN_TIMES = ("N/A", "Unknown", "")


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Slurm's answers about some jobs, by id: 17, or 17_3 for a task of an array."""

    jobs: Mapping[str, QueuedJob]
    records: Mapping[str, Sequence[JobRecord]]


def read_states(paths: Sequence[Path]) -> list[RunState]:
    """A state for each directory, in their order. One that cannot be read is a row which says why."""
    states = []
    for path in paths:
        try:
            states.append(read_state(path))
        except UserError as error:
            if len(paths) == 1:
                raise
            states.append(RunState(name=path.name, path=str(path), state="damaged", why=str(error)))
    return with_queue(states)


def with_queue(states: Sequence[RunState]) -> list[RunState]:
    """The states with what Slurm knows of each run's last job.

    Where Slurm gives no answer, a line on stderr says so and the directories' word stands.
    """
    asked = [state.job for state in states if state.job and state.state not in _FINAL]
    if not asked:
        return list(states)
    try:
        queue = ask(asked)
    except UserError as error:
        print(f"note: told from the directories alone: {error}", file=sys.stderr)
        return list(states)
    return [joined(state, state.job, queue) if state.job else state for state in states]


def ask(jobs: Sequence[str]) -> Queue:
    """Ask Slurm about these jobs, all at once. UserError if there is none here or it gives no answer.

    Accounting is asked only about jobs that the controller has forgotten, or that may have run before.
    """
    queued = {job.address: job for job in slurm.jobs(jobs)}
    unclear = [job for job in jobs if job not in queued or queued[job].state == "PENDING"]
    records: dict[str, list[JobRecord]] = {}
    for record in slurm.records(unclear):
        records.setdefault(record.array_task, []).append(record)
    return Queue(jobs=queued, records=records)


def joined(state: RunState, job: str, queue: Queue) -> RunState:
    """The state of a run whose last job is `job`; what Slurm says of the job wins over old signs of life."""
    queued = queue.jobs.get(job)
    records = queue.records.get(job, ())
    if queued is not None and queued.is_live:
        return (
            _waiting(state, queued, records) if queued.state == "PENDING" else _going(state, queued)
        )
    if state.state in (*_FINAL, "stopped", "cancelled"):
        return state
    word = queued.state if queued is not None else records[-1].state if records else ""
    return _ended(state, word)


def _waiting(state: RunState, job: QueuedJob, records: Sequence[JobRecord]) -> RunState:
    why = _REASONS.get(job.reason, job.reason)
    if job.start not in _UNKNOWN_TIMES:
        why += f", expected to begin {job.start.replace('T', ' ')}"
    state = replace(state, hosts=())
    if state.state in ("requeued", "preempted"):  # the journal knows why
        return replace(state, why=f"{state.why}; {why}", seconds_left=None)
    if not state.attempts:
        return replace(state, state="queued", why=why, seconds_left=None)
    ends = [
        record.state.split()[0] for record in records if record.state.split()[0] in _BROUGHT_BACK
    ]
    word, reason = _BROUGHT_BACK[ends[-1] if ends else "REQUEUED"]
    return replace(state, state=word, why=f"{reason}; {why}", seconds_left=None)


def _going(state: RunState, job: QueuedJob) -> RunState:
    hosts = state.hosts or tuple(slurm.host_names(job.hosts)) if job.hosts else state.hosts
    if job.state != "RUNNING":
        return replace(state, state="running", why=f"its job is {job.state.lower()}", hosts=hosts)
    if state.state == "running":
        return replace(state, hosts=hosts)
    return replace(state, state="running", why="starting", hosts=hosts, attempts=state.attempts + 1)


def _ended(state: RunState, word: str) -> RunState:
    word = word.split()[0] if word else ""
    if word == "CANCELLED":
        return replace(
            state, state="cancelled", why=f"after step {state.step:,}", seconds_left=None
        )
    if state.state == "failed" and LOST not in state.why:
        return state
    why = _ENDED_BADLY.get(
        word, "its job is gone" + (f" ({word.lower()})" if word else ", and Slurm has forgotten it")
    )
    return replace(state, state="failed", why=why, seconds_left=None)
