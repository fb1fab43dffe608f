"""Steps of the surrounding Slurm job: a probe of the nodes, then the ranks of an attempt, one task
per rank."""

import contextlib
import logging
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import UserError
from foundation.files import LARGEST_LINE_BYTES, SMALL_FILE_BYTES, end_of, own_file, read_together
from foundation.programs import code_that_runs, copied_arguments
from launcher.error_lines import error_lines
from launcher.slurm.sbatch import Snapshot, option_flags
from pretrain.checkpoint.storage_retry import with_retries
from pretrain.config.cluster import ClusterConfig
from pretrain.distributed.slurm_variables import GPUS_VARIABLE, PORT_FILE_VARIABLE
from pretrain.processes.local_ranks import describe_failure, set_parent_death_signal
from pretrain.rundir.attempt_files import SRUN_LOG, AttemptFiles
from pretrain.rundir.exit_statuses import EXIT_SITE_FAILED, EXIT_STOPPED, EXPLAINED, NEVER_STARTED
from pretrain.rundir.lock import VARIABLE
from pretrain.rundir.run_dir import RunDir

# srun forwards this signal to every rank. SIGTERM would end srun itself.
SAVE_AND_STOP = signal.SIGUSR2
_POLL_SECONDS = 0.2
_END_SECONDS = 60.0
_LONGEST_STATUS = 32  # characters in a rank's status file
_PROBE_SECONDS = 60.0
_NUM_ERRORS = 5
_LOST = -signal.SIGKILL  # the status of a rank without a file: it was killed with its task
_FIRST_NAMED = re.compile(r"^srun: error: \S+: tasks? (\d+)", re.MULTILINE)
# What srun writes when a signal or scancel ends the step (group 1), or when a task has ended.
_FIRST_END = re.compile(
    r"^srun: (?:(forcing job termination|Job step aborted)|error: \S+: tasks? )", re.MULTILINE
)
_FAILED_NODE = re.compile(r"(?:Node failure on|Task launch for \S+ failed on node) ([^\s:]+)")
# How long srun may still run after the last rank's end if all have ended, or if one has failed.
# After a failure srun kills the other ranks, which takes Slurm's KillWait (30 s).
_SECONDS_AFTER_ALL = 30.0
_SECONDS_AFTER_FAILURE = 300.0
_LISTING_SECONDS = 2.0  # between two listings of the ranks' status files
# The probe on a node: prints each step that works, between our marks.
_PROBE_SCRIPT = """say() { echo "xl|$SLURMD_NODENAME|$1|lx"; }
say begun; test -d "$0" || exit 1
say sees; "$@"
"""
_ANSWER = re.compile(r"^xl\|([^|]+)\|(begun|sees|starts)\|lx$", re.MULTILINE)
BLIND = "does not see the run directory"
PROGRAM = "does not start the ranks' program"
SILENT = "does not respond"
_PROBLEMS = {"": SILENT, "begun": BLIND, "sees": PROGRAM}
STARTS = "starts"  # what the probe's program prints when it works
# srun's messages for failures that only another start of the job can end.
NEEDS_NEW_START = re.compile("Step limit reached|node configuration is not available")
_CONTAINER_SECONDS = 600.0  # a node may have to fetch the image
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The nodes and ranks of an srun step."""

    nodes: tuple[str, ...]  # in rank order
    ranks: int
    cluster: ClusterConfig

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def tasks_per_node(self) -> int:
        return self.ranks // self.num_nodes

    def node_of(self, rank: int) -> str:
        """Return a rank's node. With --distribution=block:block srun fills node after node."""
        return self.nodes[rank // self.tasks_per_node]

    def first_rank_of(self, nodes: Sequence[str]) -> int | None:
        """Return the first rank on the first of these nodes; None if the step has no such node."""
        places = [self.nodes.index(node) for node in nodes if node in self.nodes]
        return places[0] * self.tasks_per_node if places else None


def srun_command(
    step: Step, task: Sequence[str], mounts: Sequence[Path], workdir: Path
) -> list[str]:
    """Return the srun command line. A task that fails ends the others. One that ends well does not
    (--wait=0), because the others may still be saving."""
    cluster = step.cluster
    command = ["srun", f"--nodes={step.num_nodes}", f"--ntasks={step.ranks}"]
    command += [f"--ntasks-per-node={step.tasks_per_node}"]
    command += [f"--cpus-per-task={cluster.cores_per_rank}", f"--nodelist={','.join(step.nodes)}"]
    command += ["--kill-on-bad-exit=1", "--wait=0", "--label"]
    # --overlap: if a slurmstepd was killed, Slurm may believe that its step still runs. The next
    # attempt must not wait for that step; there is only one attempt at a time anyway.
    command += ["--distribution=block:block", "--export=ALL", "--overlap"]
    flags, line = in_container(cluster, task, mounts, workdir)
    return [*command, *flags, *option_flags(cluster.srun_options), *line]


def attempt_command(
    step: Step, run_dir: RunDir, files: AttemptFiles, code: Path, workdir: Path
) -> list[str]:
    """Return the srun command line of an attempt, with the container's if the cluster has one."""
    experiment = str(Snapshot(run_dir.path).experiment)
    train = copied_arguments(code, "pretrain", "train", experiment, "--run-dir", str(run_dir.path))
    log = str(files.rank_log("{rank}"))
    task = copied_arguments(code, "launcher.slurm.task", log, *train)
    return srun_command(step, task, [run_dir.path], workdir)


def task_command(node: str, *command: str, flags: Sequence[str] = ()) -> list[str]:
    """Return the srun command line of one task on a node of the job, next to its other steps."""
    srun = ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={node}"]
    return [*srun, "--overlap", "--export=ALL", "--chdir=/", *flags, *command]


def in_container(
    cluster: ClusterConfig, task: Sequence[str], mounts: Sequence[Path], workdir: Path
) -> tuple[list[str], list[str]]:
    """Return srun's flags and the command that run Python with the arguments `task`, in the
    cluster's container if it has one."""
    if not cluster.container_image:
        return [], [sys.executable, *task]
    command = ["python3", *task]
    seen = [str(mount) for mount in (*mounts, *cluster.container_mounts)]
    if cluster.container_image.endswith(".sif"):
        binds = [f"--bind={path}" for path in seen]
        gpus = ["--nv"] if cluster.num_gpus else []
        image = cluster.container_image
        apptainer = ["apptainer", "exec", *gpus, *binds, f"--pwd={workdir}", image]
        return [], [*apptainer, *command]
    pyxis = [
        f"--container-image={cluster.container_image}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in seen)}",
        f"--container-workdir={workdir}",
    ]
    return pyxis, command


class SlurmRanks:
    """The ranks of one attempt, already started. They may write while `token` claims the run."""

    def __init__(self, step: Step, run_dir: RunDir, attempt: int, token: str) -> None:
        self._step, self._run_dir = step, run_dir
        self.first_failure: int | None = None
        self.was_stopped = False
        self._was_ended_here = False  # whether this supervisor ended srun
        self.needs_new_start = False  # this start of the job can launch no step any more
        files = AttemptFiles(run_dir.logs, attempt)
        files.create_meeting()
        files.write_start([step.node_of(rank) for rank in range(step.ranks)])
        self.logs = files.rank_logs(step.ranks)
        variables = {
            "MASTER_ADDR": step.nodes[0],
            PORT_FILE_VARIABLE: str(files.port),
            **files.variables,
            "PYTHONUNBUFFERED": "1",
            GPUS_VARIABLE: str(step.cluster.num_gpus),
            VARIABLE: token,
        }
        code = code_that_runs()
        line = attempt_command(step, run_dir, files, code, Path.cwd())
        self._log = files.srun_log
        with open(self._log, "ab", opener=own_file) as log:
            log.write(f"{shlex.join(line)}\n".encode())
            log.flush()
            parent = os.getpid()
            self._srun = subprocess.Popen(
                line,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # If this supervisor is killed, srun gets the signal and passes it on to the ranks.
                preexec_fn=lambda: set_parent_death_signal(parent, SAVE_AND_STOP),
            )

    def wait(self, *, meanwhile: Callable[[], None]) -> list[int]:
        """Return exit statuses in rank order, from the files the tasks wrote."""
        ends = RankEnds(self.logs)
        while self._srun.poll() is None:
            try:
                meanwhile()
            except UserError:
                # For example StaleAttempt: this node was cut off, and Slurm has restarted the job
                # elsewhere. If srun ended normally here, it would signal its step by number, and
                # steps of the new start have the same numbers.
                kill_silently(self._srun.pid)
                raise
            if ends.are_overdue():
                _log.warning("srun still waits although its ranks have ended: ending it")
                self._was_ended_here = True
                self._srun.terminate()  # srun first waits for its step, up to Slurm's KillWait
                try:
                    self._srun.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    self._srun.kill()
            time.sleep(_POLL_SECONDS)
        # While storage is away, all files of the attempt seem to be missing.
        with_retries(self._run_dir.retry, self._run_dir.ledger.check_present)
        ends.read_listed()
        ends.read_rest()
        log = self._srun_output()
        self.needs_new_start = NEEDS_NEW_START.search(log) is not None
        # If a node failed, srun kills the ranks on other nodes and names only these ranks. So a
        # rank of the failed node is the first failure.
        lost = self._step.first_rank_of(failed_nodes(log))
        has_failure = lost is not None or any(end.is_failure for end in ends.by_rank.values())
        self.was_stopped = not has_failure and not self._was_ended_here and ended_from_outside(log)
        of_ranks = first_failure(ends.by_rank, len(self.logs), log)
        self.first_failure = of_ranks if lost is None else lost
        return ends.statuses()

    def _srun_output(self) -> str:
        """Return what srun has written; '' if it cannot be read: then ranks' statuses decide."""
        with contextlib.suppress(OSError):
            return end_of(self._log, LARGEST_LINE_BYTES)
        return ""

    def terminate(self) -> None:
        self._srun.send_signal(SAVE_AND_STOP)

    def kill(self) -> None:
        self._was_ended_here = True
        self._srun.kill()

    def describe_failure(self, statuses: Sequence[int]) -> str:
        if all(status == NEVER_STARTED for status in statuses):
            errors = list(error_lines(self._srun_output().splitlines()))
            tail = "\n".join(f"  | {line}" for line in errors[:_NUM_ERRORS])
            return f"no rank started; the first errors in {self._log}:\n{tail}"
        return describe_failure(statuses, self.logs, first_failure=self.first_failure)


@dataclass(frozen=True)
class RankEnd:
    """The exit status that a task wrote about its rank, and when."""

    status: int
    time: float

    @property
    def is_failure(self) -> bool:
        return self.status not in (0, EXIT_STOPPED)


class RankEnds:
    """The ends of ranks, read from the tasks' status files beside `logs`, each file once."""

    def __init__(self, logs: Sequence[Path]) -> None:
        self.by_rank: dict[int, RankEnd] = {}
        self._logs = logs
        self._changed = self._listed = time.monotonic()

    def are_overdue(self) -> bool:
        """Return whether srun runs too long after its ranks' ends: it has lost a task, as when a
        slurmstepd was killed. To be called often."""
        now, known = time.monotonic(), len(self.by_rank)
        if now - self._listed < _LISTING_SECONDS:
            return False
        self._listed = now
        self.read_listed()
        if len(self.by_rank) != known:
            self._changed = now
        return now - self._changed > seconds_left_to_srun(self.by_rank, len(self._logs))

    def read_listed(self) -> None:
        """Read new status files: one listing of the directory shows which there are."""
        with contextlib.suppress(OSError):  # storage is away
            names = set(os.listdir(self._logs[0].parent))
            self._read(
                rank for rank in self._missing if _status_file(self._logs[rank]).name in names
            )

    def read_rest(self) -> None:
        """Try all other status files, too: a network file system may not list a new one yet."""
        self._read(self._missing)

    def statuses(self) -> list[int]:
        """Return exit statuses in rank order. A rank without status file and log never started,
        unless srun's log is missing too: then somebody removed the logs.

        A rank that fails writes its status into removed logs, too. Without any status and srun's
        log nothing is known of the run: its files were lost, as if storage had failed.
        """
        missing = self._missing
        has_log = [True] * len(missing)
        with contextlib.suppress(OSError):
            if (self._logs[0].parent / SRUN_LOG).exists():
                has_log = read_together(Path.exists, [self._logs[rank] for rank in missing])
            elif not self.by_rank:
                return [EXIT_SITE_FAILED] * len(missing)
        statuses = {rank: end.status for rank, end in self.by_rank.items()}
        for rank, started in zip(missing, has_log, strict=True):
            statuses[rank] = _LOST if started else NEVER_STARTED
        return [statuses[rank] for rank in range(len(self._logs))]

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(len(self._logs)) if rank not in self.by_rank]

    def _read(self, ranks: Iterable[int]) -> None:
        ranks = list(ranks)
        ends = read_together(_end_in, [_status_file(self._logs[rank]) for rank in ranks])
        self.by_rank |= {rank: end for rank, end in zip(ranks, ends, strict=True) if end}


def _status_file(log: Path) -> Path:
    return log.with_suffix(".status")


def _end_in(file: Path) -> RankEnd | None:
    try:
        with open(file) as opened:
            # The file server's time of the write, because clocks of nodes differ.
            return RankEnd(int(opened.read(_LONGEST_STATUS)), os.fstat(opened.fileno()).st_mtime)
    except (OSError, ValueError):  # not there, or storage is away
        return None


def first_failure(ends: Mapping[int, RankEnd], num_ranks: int, srun_log: str) -> int | None:
    """Return the rank whose failure made the others fail; None without a failure.

    That is the first rank that reports what the user has to change (a store may deny access to one
    rank alone), else the first that a signal killed, else the first to fail. Ranks that SIGTERM
    ended do not count: srun ends the others with it. If no rank reports a failure, as when no task
    could start, it is the first rank that srun names.
    """
    failed = [
        rank for rank, end in ends.items() if end.is_failure and end.status != -signal.SIGTERM
    ]
    explained = [rank for rank in failed if ends[rank].status in EXPLAINED]
    killed = [rank for rank in failed if ends[rank].status < 0]
    if failed:
        return min(explained or killed or failed, key=lambda rank: ends[rank].time)
    named = _FIRST_NAMED.search(srun_log)
    any_failed = len(ends) < num_ranks or any(end.is_failure for end in ends.values())
    return int(named[1]) if named and any_failed else None


def ended_from_outside(log: str) -> bool:
    """Return whether a signal to srun or scancel has ended the step.

    Then srun writes that it kills the ranks before it writes that any task has ended.
    """
    first = _FIRST_END.search(log)
    return first is not None and first[1] is not None


def failed_nodes(log: str) -> list[str]:
    """Return the nodes that Slurm or srun names as failed in this log, in the log's order."""
    return _FAILED_NODE.findall(log)


def seconds_left_to_srun(ends: Mapping[int, RankEnd], num_ranks: int) -> float:
    """Return how many seconds srun may still run after the last of these ends."""
    if len(ends) == num_ranks:
        return _SECONDS_AFTER_ALL
    is_failing = any(end.is_failure for end in ends.values())
    return _SECONDS_AFTER_FAILURE if is_failing else math.inf


def kill_silently(srun: int) -> None:
    """Kill srun without ending its step; first its helper, which would end the step by number."""
    with open(f"/proc/{srun}/task/{srun}/children") as helpers:
        pids = [*map(int, helpers.read(SMALL_FILE_BYTES).split()), srun]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Probe:
    """The result of a probe. `problems`: node -> why it cannot run a rank now."""

    problems: dict[str, str]
    needs_new_start: bool = False
    errors: tuple[str, ...] = ()  # the first error lines of srun and nodes


def probe_nodes(step: Step, run_dir: Path, meanwhile: Callable[[], None]) -> Probe:
    """Start the ranks' program on each node, in the same way as for an attempt.

    `meanwhile` is called often; what it raises ends the probe.
    """
    # The code is in the run directory. A node without that file system has an empty mount point.
    code = code_that_runs()
    program = copied_arguments(code, "launcher.slurm.task", STARTS)
    flags, line = in_container(step.cluster, program, [run_dir], Path.cwd())
    srun = ["srun", f"--nodes={step.num_nodes}", f"--ntasks={step.num_nodes}"]
    srun += [f"--nodelist={','.join(step.nodes)}", "--ntasks-per-node=1", "--overlap"]
    srun += ["--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--chdir=/"]
    srun += [*flags, *option_flags(step.cluster.srun_options), "bash", "-c", _PROBE_SCRIPT]
    seconds = _CONTAINER_SECONDS if step.cluster.container_image else _PROBE_SECONDS
    with tempfile.TemporaryFile() as printed:
        probe = subprocess.Popen(
            [*srun, str(code), *line], stdin=subprocess.DEVNULL, stdout=printed, stderr=printed
        )
        deadline, is_late = time.monotonic() + seconds, False
        try:
            while probe.poll() is None and not is_late:
                meanwhile()
                time.sleep(_POLL_SECONDS)
                is_late = time.monotonic() > deadline
        finally:
            if probe.poll() is None:
                kill_silently(probe.pid)
                probe.wait()
        printed.seek(0)
        said = printed.read(LARGEST_LINE_BYTES).decode(errors="replace")
    return probe_answers(step.nodes, said, f" in {seconds:.0f} s" if is_late else "")


def probe_answers(nodes: Sequence[str], said: str, late: str = "") -> Probe:
    """Return the result from the output: each node prints how far its probe has come."""
    last = dict(_ANSWER.findall(said))
    problems = {
        node: _PROBLEMS[last.get(node, "")] + late for node in nodes if last.get(node) != STARTS
    }
    # If srun names failed nodes, it has ended the probes on the others, which proves nothing.
    if named := failed_nodes(said):
        problems = {node: SILENT for node in nodes if node in named} or problems
    errors = sorted(error_lines(said.splitlines()), key=lambda line: line.startswith("srun: "))
    return Probe(problems, NEEDS_NEW_START.search(said) is not None, tuple(errors[:_NUM_ERRORS]))
