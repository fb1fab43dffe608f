"""Slurm's commands; the only place that runs them. Output is asked for field by field: JSON varies by version."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from data_pipeline.errors import ConfigError, UserError

T = TypeVar("T")

_INHERITED = (
    "SLURM_",
    "SBATCH_",
    "SQUEUE_",
    "SACCT_",
    "SINFO_",
    "PMIX_",
)  # a surrounding job's would change ours
_UNREACHABLE = (
    "unable to contact",
    "timed out",
    "connection refused",
    "connect failure",
    "zero bytes",
    "unreachable",
)
_UNREACHABLE += (
    "unable to establish controller",
    "temporarily unable",
    "communication",
    "unexpected message",
)
_NO_SLURM = "'{}' finds no cluster: no Slurm on this host; run this on a login node, or use 'launcher local'"
_COMMAND_SECONDS = 120.0
_SETTLE_SECONDS = 2.0  # a controller that comes back answers questions before it has taken what lay in its sockets
_JOB_FIELDS = "%A|%F|%K|%j|%T|%r|%N|%M|%L|%S"
_RECORD_FIELDS = "JobIDRaw,JobID,JobName,State,ExitCode,Start,End,NodeList"


class SlurmUnreachable(UserError):
    """The controller gave no answer: nothing is known about any job."""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """What squeue says about a job; those that ended stay for minutes."""

    id: str
    array_id: str  # of the array it belongs to; its own id without one
    array_index: str  # "" outside of arrays
    name: str
    state: str  # PENDING, RUNNING, COMPLETING, TIMEOUT ...
    reason: str  # why it waits or ended, in Slurm's words
    hosts: str  # n[1-2]
    elapsed: str
    time_left: str
    start: str  # when it began, or is expected to

    @property
    def address(self) -> str:
        """What Slurm's commands know this job alone by: 17, or 17_3 for a task of an array."""
        return f"{self.array_id}_{self.array_index}" if self.array_index else self.id

    @property
    def is_live(self) -> bool:
        """Whether it waits, runs or is being ended."""
        return self.state in (
            "PENDING",
            "RUNNING",
            "SUSPENDED",
            "COMPLETING",
            "CONFIGURING",
            "PREEMPTED",
            "REQUEUED",
        )


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What accounting says about one start of a job; a requeued job has several."""

    id: str
    array_task: str  # 17_3, or the id
    name: str
    state: str
    exit_code: str
    start: str
    end: str
    hosts: str


@dataclass(frozen=True, kw_only=True)
class Partition:
    name: str
    is_default: bool
    num_nodes: int
    cpus_per_node: int  # of its largest node, as are the GPUs
    gpus_per_node: int
    time_limit: str


def patiently(
    ask: Callable[[], T], say: Callable[[str], None] = print, patience: float = 300.0
) -> T:
    """What `ask` returns; while the controller does not answer it is asked again, for `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return ask()
        except SlurmUnreachable as error:
            if time.monotonic() > deadline:
                raise
            say(f"{error}; asking again")
            _wait_for_controller(deadline)


def submit(script: Path, name: str) -> str:
    """Hand a batch script whose job is called `name` to Slurm; the job's id.

    There is never a second live job of that name: where an answer was lost, the job is looked for before another try.
    """

    def find_or_submit() -> str:
        if live := live_jobs(name):
            return live[0].id
        result = _run(["sbatch", "--parsable", str(script)])
        if result.returncode:
            raise ConfigError(f"sbatch refused {script}: {_one_line(result.stderr)}")
        return result.stdout.strip().split(";")[0]

    return patiently(find_or_submit)


def own_job() -> str:
    """What the surrounding job alone is known by. The id of an array's task will not do: one has that of the array."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("'launcher batch' is for batch scripts; use 'launcher submit'")
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def live_jobs(name: str) -> list[QueuedJob]:
    """The jobs of this name that wait or run, oldest first; array tasks one by one."""
    return [job for job in _squeue("--name", name) if job.is_live]


def jobs(ids: Sequence[str]) -> list[QueuedJob]:
    """What squeue knows of these jobs. One missing was forgotten (minutes after its end) or never was."""
    return _squeue("-j", ",".join(ids)) if ids else []


def details(job: str) -> dict[str, str]:
    """What `scontrol show job` says, such as JobState, Reason, NodeList; empty for a job it has forgotten."""
    result = _run(["scontrol", "show", "job", "-o", job])
    fields = re.findall(r"(\w+)=(\S*)", result.stdout) if result.returncode == 0 else []
    return {name: value for name, value in fields if value != "(null)"}


def records(ids: Sequence[str]) -> list[JobRecord]:
    """Accounting's records of these jobs, oldest first; empty without accounting, and at first: it lags a second."""
    if not ids:
        return []
    result = _run(["sacct", "-D", "-X", "-n", "-P", "-o", _RECORD_FIELDS, "-j", ",".join(ids)])
    lines = (
        [line.split("|") for line in result.stdout.splitlines()] if result.returncode == 0 else []
    )
    keys = ("id", "array_task", "name", "state", "exit_code", "start", "end", "hosts")
    return [
        JobRecord(**dict(zip(keys, line, strict=True))) for line in lines if len(line) == len(keys)
    ]


def partitions() -> list[Partition]:
    """The partitions open to this user's cluster."""
    result = _checked(["sinfo", "-h", "-o", "%P|%D|%c|%G|%l"])
    found: dict[str, Partition] = {}
    for line in result.splitlines():  # one for each kind of node
        label, nodes, cpus, resources, limit = line.split("|")
        name = label.rstrip("*")
        known = found.get(name)
        gpus = sum(map(int, re.findall(r"gpu(?::[^:(,]+)?:(\d+)", resources)))
        found[name] = Partition(
            name=name,
            is_default=label.endswith("*"),
            num_nodes=int(nodes) + (known.num_nodes if known else 0),
            cpus_per_node=max(int(cpus.rstrip("+")), known.cpus_per_node if known else 0),
            gpus_per_node=max(gpus, known.gpus_per_node if known else 0),
            time_limit=limit,
        )
    return list(found.values())


def cancel(job: str) -> None:
    """End a job for good; one that ended already is left alone."""
    _checked(["scancel", job])


def requeue(job: str, exclude: Sequence[str] = ()) -> None:
    """Put a job back into the queue at once, away from some hosts; ends what it runs now, this process too if its own.

    Slurm then holds it back for the life of a credential, by default two minutes.
    """
    before = details(job).get("ExcNodeList")
    # The commands inherit the mask: of its own job's last signals to this process they must not die half-way.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        _checked(["scontrol", "requeue", job])
        if exclude:  # Slurm takes this of jobs that wait only
            hosts = [*exclude, *([before] if before else [])]
            _checked(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(hosts)}"])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start an srun that gets nodes of its own; what it and its tasks say goes to stderr."""
    try:
        return subprocess.Popen(
            command,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UserError(_NO_SLURM.format(command[0])) from None


def host_names(node_list: str) -> list[str]:
    """`n[1-2]` -> n1, n2."""
    return _checked(["scontrol", "show", "hostnames", node_list]).split()


def _squeue(*which: str) -> list[QueuedJob]:
    result = _run(["squeue", "-h", "-r", "-t", "all", "-o", _JOB_FIELDS, *which])
    if result.returncode and "invalid job id" not in result.stderr.lower():
        raise UserError(f"squeue failed: {_one_line(result.stderr)}")
    found = []
    for line in result.stdout.splitlines():
        number, array, index, name, state, reason, hosts, elapsed, left, start = line.split("|")
        found.append(
            QueuedJob(
                id=number,
                array_id=array,
                array_index="" if index == "N/A" else index,
                name=name,
                state=state,
                reason=reason,
                hosts=hosts,
                elapsed=elapsed,
                time_left=left,
                start=start,
            )
        )
    return sorted(found, key=lambda job: int(job.id))


def _wait_for_controller(deadline: float) -> None:
    while time.monotonic() < deadline:
        time.sleep(1)
        try:
            if _run(["squeue", "-h", "-o", "%A"]).returncode == 0:
                break
        except SlurmUnreachable:
            continue
    time.sleep(_SETTLE_SECONDS)


def _checked(command: Sequence[str]) -> str:
    result = _run(command)
    if result.returncode:
        raise UserError(f"'{' '.join(command[:3])}' failed: {_one_line(result.stderr)}")
    return result.stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The finished command; SlurmUnreachable if the controller was not there to answer it."""
    try:
        result = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=_COMMAND_SECONDS
        )
    except FileNotFoundError:
        raise UserError(_NO_SLURM.format(command[0])) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachable(
            f"'{command[0]}' got no answer in {_COMMAND_SECONDS:.0f} s from the controller"
        ) from None
    if (
        result.returncode and "configuration source" in result.stderr
    ):  # the commands alone are installed
        raise UserError(_NO_SLURM.format(command[0]))
    if result.returncode and any(sign in result.stderr.lower() for sign in _UNREACHABLE):
        raise SlurmUnreachable(f"the Slurm controller does not answer ({_one_line(result.stderr)})")
    return result


def _environment() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if key == "SLURM_CONF" or not key.startswith(_INHERITED)
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())
