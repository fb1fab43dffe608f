"""Slurm's commands and their answers; srun.py has the command lines of srun.

Fields are requested one by one, because the JSON of Slurm's commands varies by version. Each record
stands between our own marks, after a header, because sites print banners, wrap commands and cut
lines. If an answer is incomplete, Slurm is asked again.
"""

import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from foundation.errors import ConfigError, UserError
from pretrain.checkpoint.storage_retry import CLOCK, Clock

T = TypeVar("T")
P = ParamSpec("P")
Runner = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]

# Variables of a surrounding job that would change the defaults of our commands.
_INHERITED = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SINFO_", "PMIX_")
# What the commands write to stderr, here in lower case, if the controller does not respond.
_UNREACHABLE = re.compile(
    "unable to contact|timed out|connection refused|connect failure|zero bytes|unreachable"
    "|unable to establish controller|temporarily unable|communication|unexpected message"
    "|authentication error"  # the munge daemon is down
)
_NO_SLURM = (
    "'{}' found no Slurm cluster on this host; run it on a login node, or use 'launcher local'"
)
_LIVE_STATES = ("RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING")
_HELD_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT")  # after `scontrol requeuehold`
_COMMAND_SECONDS = 120.0
# A pause after the controller is back: it answers queries before it processes waiting submissions.
_SETTLE_SECONDS = 2.0
_ACCOUNTING_SECONDS = 10.0  # the limit of sacct: old states of jobs are not worth a longer wait
# The directory is last: its name comes from a user and may contain the separator.
_JOB_FIELDS = ("%A", "%F", "%K", "%T", "%r", "%N", "%S", "%Z")
_NODES = r"(?:[\w.-]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"  # n[1-2,7]
_JOB = re.compile(r"[0-9]+\|[0-9]+\|[^|]*\|[A-Z_]+(\|[^|]*){3}\|(/.*|\(null\))?", re.DOTALL)
_START, _END = "xl|", "|lx"  # our marks around a record
_RECORD = re.compile(rf"^{re.escape(_START)}(.*?){re.escape(_END)}$", re.MULTILINE | re.DOTALL)
_BETWEEN = "|xl|"  # what sacct prints after each field, the last one too
_TEXT_OF_USERS = re.compile(r"\b(JobName|\w*Comment|Command|WorkDir)=.*")  # to the line's end
_NEEDED = {"JobState", "Restarts", "WorkDir"}  # WorkDir comes late: a cut answer lacks it
_JOB_NUMBER = re.compile(r"[0-9]+(_[0-9]+)?")
_SUBMITTED = re.compile(r"^([0-9]+)(;\S+)?$", re.MULTILINE)

_log = logging.getLogger(__name__)


class SlurmUnreachable(UserError):
    """The controller did not respond: nothing is known about any job."""


class BrokenAnswer(SlurmUnreachable):
    """Part of an answer is unreadable; `whole` has the readable records, or the jobs in them."""

    def __init__(self, message: str, whole: list[Any]) -> None:
        super().__init__(message)
        self.whole = whole


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue reports it, up to some minutes after its end."""

    id: str
    array_id: str  # the array's id for a task of an array, else its own id
    array_index: str  # N/A outside of arrays
    state: str  # PENDING, RUNNING, COMPLETING, TIMEOUT ...
    reason: str  # why it waits or ended, as Slurm reports it
    nodes: str  # n[1-2]
    start: str  # when it started, or is expected to
    work_dir: str  # identifies the run: it is never renamed, and each run has its own

    @property
    def address(self) -> str:
        """The job's name in Slurm's commands: 17, or 17_3 for a task of an array."""
        is_task = self.array_index != "N/A"
        return f"{self.array_id}_{self.array_index}" if is_task else self.id

    @property
    def known_nodes(self) -> list[str]:
        """The names of its nodes, for display; empty if Slurm's list is unreadable."""
        try:
            return node_names(self.nodes)
        except SlurmUnreachable:
            return []

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
    """One start of a job as accounting reports it; a requeued job has several."""

    address: str  # 17, or 17_3
    state: str
    work_dir: str


@dataclass(frozen=True, kw_only=True)
class Partition:
    name: str
    is_default: bool
    num_nodes: int
    cpus_per_node: int  # the most of any node
    gpus_per_node: int  # the most of any node
    cores_per_gpu: int = 0  # the fewest of any kind of node; 0: no node has GPUs
    time_limit: str


class Slurm:
    """Slurm's commands. `run` runs one of them, with a limit in seconds."""

    def __init__(self, run: Runner | None = None, clock: Clock = CLOCK) -> None:
        self._runner, self._clock = run or run_command, clock

    def retry_unreachable(self, ask: Callable[[], T], timeout: float = 300.0) -> T:
        """Call `ask` until the controller responds, for `timeout` seconds; return its result."""
        deadline = self._clock.now() + timeout
        while True:
            try:
                return ask()
            except SlurmUnreachable as error:
                if self._clock.now() > deadline:
                    raise
                _log.warning("%s; retrying", error)
                self._wait_for_controller(deadline)

    def answered(self, ask: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call `ask` until the controller responds, without a limit: Slurm limits a job's time."""
        return self.retry_unreachable(lambda: ask(*arguments, **options), timeout=math.inf)

    def submit(self, script: Path, work_dir: str) -> tuple[str, str]:
        """Submit a batch script; return the job's id and working directory, as Slurm reports it.

        The job works in `work_dir`. If Slurm's answer was lost, the job may exist all the same, so
        every try first looks for a live job there.
        """

        def find_or_submit() -> tuple[str, str]:
            if live := self.live_jobs(work_dir):
                return live[0].array_id, work_dir
            result = self._run(["sbatch", "--parsable", str(script)])
            if result.returncode:
                reason = _one_line(result.stderr).replace("sbatch: error: ", "")
                advice = "correct the cluster file, or split the sweep"
                raise ConfigError(f"sbatch rejected the job: {reason}; {advice}")
            printed = [number for number, _ in _SUBMITTED.findall(result.stdout)]
            return self.retry_unreachable(lambda: self._read_back(printed, work_dir))

        return self.retry_unreachable(find_or_submit)

    def _read_back(self, printed: Sequence[str], work_dir: str) -> tuple[str, str]:
        """Return id and working directory of the submitted job, from squeue.

        The output of sbatch is not enough: a wrapper may print other numbers, and the site may move
        the job to another directory.
        """
        mine = self._jobs_of_this_user()
        own = [job for job in mine if job.work_dir == work_dir]
        own = own or [job for job in mine if job.array_id in printed]
        if own:
            return own[-1].array_id, own[-1].work_dir
        if not printed:
            raise SlurmUnreachable("sbatch accepted the job, but did not print its number")
        return printed[-1], work_dir

    def live_jobs(self, *work_dirs: str) -> list[QueuedJob]:
        """Return this user's live jobs and tasks that work in these directories, oldest first."""
        mine = self._jobs_of_this_user()
        return [job for job in mine if job.is_live and job.work_dir in work_dirs]

    def _jobs_of_this_user(self) -> list[QueuedJob]:
        return self._squeue("--user", str(os.geteuid()))

    def jobs(self, ids: Sequence[str]) -> list[QueuedJob]:
        """Return these jobs as squeue reports them. It omits jobs that ended minutes ago, or never
        existed."""
        ids = _job_numbers(ids)
        return self._squeue("-j", ",".join(ids)) if ids else []

    def steps(self, job: int) -> list[str]:
        """Return a job's running steps that srun started, such as 17.0."""
        listed = [step for (step,) in self._records(["squeue", "-s", "-j", str(job)], ["%i"])]
        return [step for step in listed if step.rpartition(".")[2].isdecimal()]

    def details(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`, such as JobState, Reason and NodeList; empty if
        Slurm does not know the job."""
        result = self._run(["scontrol", "show", "job", job])
        if result.returncode and "invalid job id" in result.stderr.lower():
            return {}
        fields = {} if result.returncode else job_fields(result.stdout)
        if not fields:
            said = _one_line(result.stderr) or _shown(result.stdout)
            raise SlurmUnreachable(f"scontrol failed: {said}")
        return fields

    def records(self, ids: Sequence[str]) -> list[JobRecord]:
        """Return accounting's records of these jobs, oldest first. Empty without accounting, in a
        job's first second, and, with a warning, if accounting does not respond."""
        ids = _job_numbers(ids)
        if not ids:
            return []
        fields = ["-o", "JobID,State,WorkDir", f"--delimiter={_BETWEEN}"]
        command = ["sacct", "-D", "-X", "-p", *fields, "-j", ",".join(ids)]
        try:
            result = self._run(command, _ACCOUNTING_SECONDS)
        except SlurmUnreachable:
            result = None
        if result is None or (not result.returncode and "JobID" not in result.stdout):
            _log.warning("how earlier starts of jobs ended is unknown: sacct gets no answer")
            return []
        if result.returncode:
            return []
        lines = (line.split(_BETWEEN) for line in result.stdout.splitlines())
        whole = (line for line in lines if len(line) == 4 and _JOB_NUMBER.fullmatch(line[0]))
        return [JobRecord(address, state, work_dir) for address, state, work_dir, _ in whole]

    def partitions(self) -> list[Partition]:
        """Return the cluster's partitions; empty, with a warning, if Slurm keeps them private."""
        partitions: dict[str, Partition] = {}
        try:  # one record for each kind of node
            records = self._records(["sinfo"], ["%P", "%D", "%c", "%G", "%l"])
        except _Denied as error:
            _log.warning("%s; sbatch decides whether the cluster can run the job", error)
            return []
        for label, *numbers, resources, limit in records:
            name = label.rstrip("*")
            known = partitions.get(name)
            nodes, cpus = (_number(number.rstrip("+")) for number in numbers)
            gpus = sum(map(int, re.findall(r"gpu(?::[^:(,]+)?:(\d+)", resources)))
            shares = [known.cores_per_gpu if known else 0, cpus // gpus if gpus else 0]
            partitions[name] = Partition(
                name=name,
                is_default=label.endswith("*"),
                num_nodes=nodes + (known.num_nodes if known else 0),
                cpus_per_node=max(cpus, known.cpus_per_node if known else 0),
                gpus_per_node=max(gpus, known.gpus_per_node if known else 0),
                cores_per_gpu=min(filter(None, shares), default=0),
                time_limit=limit,
            )
        return list(partitions.values())

    def node_states(self, names: Sequence[str], field: str = "%T") -> dict[str, str]:
        """Return the states of nodes in sinfo's words (`idle`, `mixed*`), or another field."""
        try:
            listed = self._records(["sinfo", "-N", "-n", ",".join(names)], ["%N", field])
        except _Denied:  # callers can work without states
            return {}
        return dict(listed)  # one entry per node, though sinfo lists it once per partition

    def cancel(self, job: str) -> None:
        """Cancel a job or a step, if it has not ended."""
        self._checked(["scancel", job])

    def ask(self, job: str, number: int) -> None:
        """Send a signal to all processes of the job's steps, but not to its batch script."""
        self._checked(["scancel", f"--signal={signal.Signals(number).name[3:]}", job])

    def stop(self, job: str) -> None:
        """Ask the job's supervisor to save and stop; Slurm does not requeue the job after that."""
        self._checked(["scontrol", "update", f"JobId={job}", "Requeue=0"])
        self._checked(["scancel", "--batch", "--signal=TERM", job])

    def requeue(self, job: str, restart: int, exclude: Sequence[str] = ()) -> None:
        """End start number `restart` of a job and requeue it, from now on without nodes `exclude`.

        Slurm ends all processes of the job, perhaps this one, and lets the job wait for the
        lifetime of a credential, by default two minutes. Callers may repeat this if Slurm's answer
        was lost: the next start, with a higher number, is not requeued.
        """
        fields = self.details(job)
        if not fields:
            raise UserError(f"job {job} is unknown to Slurm")
        is_requeued = int(fields["Restarts"]) > restart
        excluded = node_names(fields.get("ExcNodeList", ""))
        # If the job is our own, Slurm sends SIGTERM to all its processes as soon as it is requeued.
        # Commands inherit the blocked signal. So they and this process live until the update.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            if not is_requeued:
                self._checked(["scontrol", "requeue", job])
            # A user may set ExcNodeList, but only while the job waits. An update replaces the list.
            if not set(exclude) <= set(excluded) and not (
                is_requeued and fields["JobState"] == "RUNNING"
            ):
                nodes = ",".join(dict.fromkeys([*exclude, *excluded]))
                self._checked(["scontrol", "update", f"JobId={job}", f"ExcNodeList={nodes}"])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _squeue(self, *which: str) -> list[QueuedJob]:
        try:
            records = self._records(["squeue", "-r", "-t", "all", *which], _JOB_FIELDS)
            problem = ""
        except _UnknownJob:
            return []
        except BrokenAnswer as error:
            records, problem = error.whole, str(error)
        readable = [record for record in records if _JOB.fullmatch("|".join(record))]
        jobs = sorted((QueuedJob(*record) for record in readable), key=lambda job: int(job.id))
        if unreadable := [record for record in records if record not in readable]:
            problem = f"Slurm did not answer; found the job {unreadable[0]}"
        if problem:
            raise BrokenAnswer(problem, jobs)
        return jobs

    def _records(self, command: Sequence[str], fields: Sequence[str]) -> list[list[str]]:
        """Return the records that squeue or sinfo lists, without their header."""
        form = _START + "|".join(fields) + _END
        return records_in(self._checked([*command, "-o", form]), len(fields))[1:]

    def _wait_for_controller(self, deadline: float) -> None:
        while self._clock.now() < deadline:
            self._clock.sleep(1)
            try:
                if self._run(["squeue", "-h", "-o", "%A"]).returncode == 0:
                    break
            except SlurmUnreachable:
                continue
        self._clock.sleep(_SETTLE_SECONDS)

    def _checked(self, command: Sequence[str]) -> str:
        result = self._run(command)
        if result.returncode:
            said = result.stderr.lower()
            kind = _UnknownJob if "invalid job id" in said else UserError
            kind = _Denied if "permission denied" in said else kind
            raise kind(f"'{' '.join(command[:3])}' failed: {_one_line(result.stderr)}")
        return result.stdout

    def _run(
        self, command: Sequence[str], seconds: float = _COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Return the finished command; SlurmUnreachable if the controller did not respond."""
        try:
            result = self._runner(command, seconds)
        except FileNotFoundError:
            raise UserError(_NO_SLURM.format(command[0])) from None
        except subprocess.TimeoutExpired:
            raise SlurmUnreachable(
                f"'{command[0]}': the Slurm controller did not respond in {seconds:.0f} s"
            ) from None
        said = _one_line(result.stderr) if result.returncode else ""
        if "configuration source" in said:  # only the commands are installed
            raise UserError(_NO_SLURM.format(command[0]))
        if _UNREACHABLE.search(said.lower()):
            raise SlurmUnreachable(f"the Slurm controller does not respond ({said})")
        return result


def run_command(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm, whatever bytes it prints, and return how it ended."""
    return subprocess.run(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=seconds,
    )


def records_in(printed: str, num_fields: int) -> list[list[str]]:
    """Return the records between our marks, the header first. Raises BrokenAnswer without a header,
    or if a record is cut or has another number of fields."""
    records = [record.split("|", num_fields - 1) for record in _RECORD.findall(printed)]
    num_begun = sum(line.startswith(_START) for line in printed.splitlines())
    whole = [record for record in records if len(record) == num_fields]
    if not records or not num_begun == len(records) == len(whole):
        raise BrokenAnswer(f"Slurm did not answer; found {_shown(printed)}", whole[1:])
    return records


def job_fields(printed: str) -> dict[str, str]:
    """Return the first job's fields from `scontrol show job`; empty if the output is cut."""
    _, begin, rest = printed.partition("JobId=")
    record = (begin + rest).partition("\n\nJobId=")[0]  # texts of users may have empty lines
    work_dir = re.search(r"^ *WorkDir=(.*)$", record, re.MULTILINE)
    fields = re.findall(r"(\w+)=(\S*)", _TEXT_OF_USERS.sub("", record))
    # A comment of several lines may imitate fields. It comes after the real ones: the first counts.
    first = dict(reversed(fields))
    if work_dir:
        first["WorkDir"] = work_dir[1]
    is_whole = first.keys() >= _NEEDED and first["Restarts"].isdecimal()
    return {key: text for key, text in first.items() if text != "(null)"} if is_whole else {}


def own_job() -> str:
    """Return the surrounding job's `address`. SLURM_JOB_ID alone does not identify a task."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("'launcher batch' is for batch scripts; use 'launcher submit'")
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start an srun with an allocation of its own; its output goes to stderr."""
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
    """Expand a node list: n1, n2, m03 from `n[1-2],m03`."""
    if node_list and not re.fullmatch(rf"{_NODES}(,{_NODES})*", node_list):
        raise SlurmUnreachable(f"Slurm did not answer; found the nodes {node_list!r}")
    return [name for part in re.findall(_NODES, node_list) for name in _expanded(part)]


def _expanded(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    ranges, _, after = rest.partition("]")
    names = []
    for span in ranges.split(","):
        first, _, last = span.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        names += [f"{before}{number:0{len(first)}d}" for number in numbers]
    return [name + tail for name in names for tail in _expanded(after)] if after else names


class _Denied(UserError):
    """Slurm keeps this information from the user (PrivateData)."""


class _UnknownJob(UserError):
    """Slurm has no such job."""


def _job_numbers(ids: Sequence[str]) -> list[str]:
    """Return the ids that Slurm could have given: a damaged ledger may hold any text."""
    return [number for number in ids if _JOB_NUMBER.fullmatch(number)]


def _number(text: str) -> int:
    if not text.isdecimal():
        raise SlurmUnreachable(f"Slurm did not answer; found {text!r} for a number")
    return int(text)


def _shown(printed: str) -> str:
    """Return the start of some output in quotes, for a message of one line."""
    return repr(_one_line(printed)[:80]) if printed.strip() else "nothing"


def _environment() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if key == "SLURM_CONF" or not key.startswith(_INHERITED)
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())
