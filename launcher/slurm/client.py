"""Runs Slurm's commands; nothing else does, except for the srun of an attempt (srun.py).

Output is requested field by field, because the JSON of Slurm's commands varies by version.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from foundation.errors import ConfigError, UserError

T = TypeVar("T")
P = ParamSpec("P")

# Variables of a surrounding job would change what our commands do.
_INHERITED = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SINFO_", "PMIX_")
# What the commands write to stderr, in lower case, when the controller did not respond.
_UNREACHABLE = re.compile(
    "unable to contact|timed out|connection refused|connect failure|zero bytes|unreachable"
    "|unable to establish controller|temporarily unable|communication|unexpected message"
    "|authentication error"  # munge is away
)
_NO_SLURM = (
    "'{}' found no Slurm cluster on this host; run it on a login node, or use 'launcher local'"
)
_LIVE_STATES = ("RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING")
_HELD_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT")  # after `scontrol requeuehold`
_COMMAND_SECONDS = 120.0
# A controller that comes back answers queries before it has processed the submissions in its
# sockets.
_SETTLE_SECONDS = 2.0
_ACCOUNTING_SECONDS = 10.0  # the history is not worth a longer wait
# Names are last, because users write them: they may contain the separator.
_JOB_FIELDS = "%A|%F|%K|%T|%r|%N|%S|%j"
_RECORD_FIELDS = "JobID,State,JobName"
_TEXT_OF_USERS = re.compile(r"\b(JobName|\w*Comment|Command|WorkDir)=.*")  # to the line's end
_JOB_NUMBER = re.compile(r"[0-9]+(_[0-9]+)?")

_log = logging.getLogger(__name__)


class SlurmUnreachable(UserError):
    """The controller did not respond: nothing is known about any job."""


@dataclass(frozen=True)
class QueuedJob:
    """What squeue reports about a job; it keeps jobs for minutes after they end."""

    id: str
    array_id: str  # of the array it belongs to; else its own id
    array_index: str  # N/A outside of arrays
    state: str  # PENDING, RUNNING, COMPLETING, TIMEOUT ...
    reason: str  # why it waits or ended, as Slurm reports it
    nodes: str  # n[1-2]
    start: str  # when it started, or is expected to
    name: str

    @property
    def address(self) -> str:
        """Identifies this job alone in Slurm's commands: 17, or 17_3 for a task of an array."""
        is_task = self.array_index != "N/A"
        return f"{self.array_id}_{self.array_index}" if is_task else self.id

    @property
    def is_live(self) -> bool:
        """Whether it is pending, running or completing."""
        return self.is_pending or self.state in _LIVE_STATES

    @property
    def is_pending(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", *_HELD_STATES)

    @property
    def is_held(self) -> bool:
        """Whether it starts only after `scontrol release`."""
        return self.is_pending and (self.state in _HELD_STATES or "held" in self.reason.lower())


@dataclass(frozen=True)
class JobRecord:
    """What accounting reports about one start of a job; a requeued job has several."""

    address: str  # 17, or 17_3
    state: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Partition:
    name: str
    is_default: bool
    num_nodes: int
    cpus_per_node: int  # of its largest node, as are the GPUs
    gpus_per_node: int
    time_limit: str


def retry_unreachable(ask: Callable[[], T], timeout: float = 300.0) -> T:
    """What `ask` returns; retried for `timeout` seconds while the controller does not respond."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return ask()
        except SlurmUnreachable as error:
            if time.monotonic() > deadline:
                raise
            _log.warning("%s; retrying", error)
            _wait_for_controller(deadline)


def answered(ask: Callable[P, T], *what: P.args, **how: P.kwargs) -> T:
    """What Slurm answers, without a timeout: Slurm ends the job's processes when it is time."""
    return retry_unreachable(lambda: ask(*what, **how), timeout=math.inf)


def submit(script: Path, name: str) -> str:
    """Submit a batch script whose job is called `name`; returns the job's id.

    Idempotent: if Slurm's answer was lost, the job may exist, so every try first looks for a live
    job of that name.
    """

    def find_or_submit() -> str:
        if live := live_jobs(name):
            return live[0].array_id
        result = _run(["sbatch", "--parsable", str(script)])
        if result.returncode:
            reason = _one_line(result.stderr).replace("sbatch: error: ", "")
            raise ConfigError(
                f"sbatch rejected the job: {reason}; correct the cluster file, or split the sweep"
            )
        return result.stdout.strip().split(";")[0]

    return retry_unreachable(find_or_submit)


def own_job() -> str:
    """The address of the surrounding job.

    For tasks SLURM_JOB_ID will not do: one of them has the id of the array.
    """
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("'launcher batch' is for batch scripts; use 'launcher submit'")
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def live_jobs(name: str) -> list[QueuedJob]:
    """This user's live jobs of this name, oldest first; array tasks one by one.

    Others can give their jobs any name.
    """
    mine = _squeue("--name", name, "--user", str(os.geteuid()))
    return [job for job in mine if job.is_live]


def jobs(ids: Sequence[str]) -> list[QueuedJob]:
    """What squeue reports about these jobs.

    One that is missing ended minutes ago, or never existed.
    """
    ids = _job_numbers(ids)
    return _squeue("-j", ",".join(ids)) if ids else []


def steps(job: int) -> list[str]:
    """The steps of a job that srun started and that still run: 17.0."""
    listed = _checked(["squeue", "-h", "-s", "-j", str(job), "-o", "%i"]).split()
    return [step for step in listed if step.rpartition(".")[2].isdecimal()]


def details(job: str) -> dict[str, str]:
    """The fields of `scontrol show job`, such as JobState, Reason, NodeList.

    Empty for a job unknown to Slurm, and for no other reason.
    """
    result = _run(["scontrol", "show", "job", job])
    if result.returncode and "invalid job id" not in result.stderr.lower():
        raise SlurmUnreachable(f"scontrol failed: {_one_line(result.stderr)}")
    fields = re.findall(r"(\w+)=(\S*)", _TEXT_OF_USERS.sub("", result.stdout))
    first = dict(reversed(fields))  # a comment of several lines comes after what it could imitate
    return {name: value for name, value in first.items() if value != "(null)"}


def records(ids: Sequence[str]) -> list[JobRecord]:
    """Accounting's records of these jobs, oldest first.

    None without accounting, or in a job's first second; a warning if it does not respond.
    """
    ids = _job_numbers(ids)
    if not ids:
        return []
    command = ["sacct", "-D", "-X", "-n", "-P", "-o", _RECORD_FIELDS, "-j", ",".join(ids)]
    try:
        result = _run(command, _ACCOUNTING_SECONDS)
    except SlurmUnreachable:
        _log.warning("how earlier starts of jobs ended is unknown: sacct gets no answer")
        return []
    listed = result.stdout.splitlines() if result.returncode == 0 else []
    return [JobRecord(*line.split("|", 2)) for line in listed if line.count("|") >= 2]


def partitions() -> list[Partition]:
    """The partitions of the cluster."""
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


def node_states(names: Sequence[str], field: str = "%T") -> dict[str, str]:
    """The states of nodes as sinfo calls them, such as `idle` and `mixed*`, or another field."""
    listed = _checked(["sinfo", "-h", "-N", "-n", ",".join(names), "-o", f"%N|{field}"])
    return dict(line.split("|", 1) for line in listed.splitlines())  # a line for each partition


def cancel(job: str) -> None:
    """Cancel a job, or a step; one that has ended already is left alone."""
    _checked(["scancel", job])


def requeue(job: str, exclude: Sequence[str] = ()) -> None:
    """Requeue a job, which ends all its processes, possibly this one; its next start avoids the
    nodes `exclude`.

    Slurm lets it wait for the lifetime of a credential, by default two minutes. The nodes go into
    ExcNodeList because that is what Slurm lets a user change of a waiting job without asking for
    its nodes by name.
    """
    before = details(job).get("ExcNodeList")
    # If the job is our own, Slurm sends SIGTERM to all its processes as soon as it is requeued. The
    # commands inherit the blocked signal, so that neither they nor this process die before the
    # update.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        _checked(["scontrol", "requeue", job])
        if exclude:  # only a job that waits can be updated, and an update replaces the list
            nodes = [*exclude, *([before] if before else [])]
            _checked(["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start an srun that gets its own nodes; its output and that of its tasks goes to stderr."""
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


def node_names(node_list: str) -> list[str]:
    """`n[1-2]` -> n1, n2; none of an empty list."""
    if not node_list:
        return []
    return _checked(["scontrol", "show", "hostnames", node_list]).split()


def _job_numbers(ids: Sequence[str]) -> list[str]:
    """Those that Slurm can have given: ledgers may be written by others."""
    return [number for number in ids if _JOB_NUMBER.fullmatch(number)]


def _squeue(*which: str) -> list[QueuedJob]:
    result = _run(["squeue", "-h", "-r", "-t", "all", "-o", _JOB_FIELDS, *which])
    if result.returncode and "invalid job id" not in result.stderr.lower():
        raise UserError(f"squeue failed: {_one_line(result.stderr)}")
    found = (QueuedJob(*line.split("|", 7)) for line in result.stdout.splitlines())
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


def _run(
    command: Sequence[str], seconds: float = _COMMAND_SECONDS
) -> subprocess.CompletedProcess[str]:
    """The finished command; SlurmUnreachable if the controller did not respond."""
    try:
        result = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=seconds
        )
    except FileNotFoundError:
        raise UserError(_NO_SLURM.format(command[0])) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachable(
            f"'{command[0]}': the Slurm controller did not respond in {seconds:.0f} s"
        ) from None
    # Only the commands are installed, without a configuration.
    if result.returncode and "configuration source" in result.stderr:
        raise UserError(_NO_SLURM.format(command[0]))
    if result.returncode and _UNREACHABLE.search(result.stderr.lower()):
        raise SlurmUnreachable(
            f"the Slurm controller does not respond ({_one_line(result.stderr)})"
        )
    return result


def _environment() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if key == "SLURM_CONF" or not key.startswith(_INHERITED)
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())
