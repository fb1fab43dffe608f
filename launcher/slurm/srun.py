"""The ranks of one attempt as a step of the surrounding Slurm job: one task per rank."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.errors import UserError
from data_pipeline.files import own_file
from data_pipeline.own_programs import code_that_runs, copied_arguments
from launcher.error_lines import error_lines
from launcher.slurm.container import in_container
from launcher.slurm.rank_statuses import RankEnds, SrunPatience, failed_nodes, first_failure
from launcher.slurm.sbatch import option_flags
from launcher.slurm.silent_nodes import SilentNodes
from launcher.slurm.snapshot import Snapshot
from pretrain.costs.cluster import ClusterConfig
from pretrain.distributed.slurm_variables import PORT_FILE_VARIABLE
from pretrain.processes.local_ranks import describe_failure, set_parent_death_signal
from pretrain.rundir.attempt_files import AttemptFiles
from pretrain.rundir.collective_traces import variables_of_attempt
from pretrain.rundir.exit_status import NEVER_STARTED
from pretrain.rundir.run_dir import RunDir

# srun forwards this to every rank. (srun itself ends on SIGTERM.)
SAVE_AND_STOP = signal.SIGUSR2
_POLL_SECONDS = 0.2
_END_SECONDS = 60.0
_PROBE_SECONDS = 60.0
_NUM_ERRORS = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What srun is asked for."""

    nodes: tuple[str, ...]  # in rank order
    ranks: int
    cluster: ClusterConfig
    python: str = sys.executable  # that runs the ranks' program unless a container does
    code: Path = field(default_factory=code_that_runs)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def tasks_per_node(self) -> int:
        return self.ranks // self.num_nodes

    def node_of(self, rank: int) -> str:
        """Where a rank runs: by --distribution=block:block, srun fills one node after another."""
        return self.nodes[rank // self.tasks_per_node]

    def first_rank_of(self, nodes: Sequence[str]) -> int | None:
        """The first rank on the first of these nodes that the step has; None if it has none."""
        places = [self.nodes.index(node) for node in nodes if node in self.nodes]
        return places[0] * self.tasks_per_node if places else None


def training_command(code: Path, run_dir: Path) -> list[str]:
    """The arguments of Python that train the run with a copy of the code."""
    experiment = Snapshot(run_dir).experiment
    train = ("train", str(experiment), "--run-dir", str(run_dir))
    return copied_arguments(code, "pretrain", *train)


def rank_task(code: Path, run_dir: Path, attempt: int, command: Sequence[str]) -> list[str]:
    """The arguments of Python that run `command` as one rank, with a log of its own."""
    log = AttemptFiles(RunDir(run_dir).logs, attempt).rank_log("{rank}")
    return copied_arguments(code, "launcher.slurm.task", str(log), *command)


def meeting_point(step: Step, run_dir: Path, attempt: int) -> dict[str, str]:
    """The environment variables by which the ranks of an attempt find each other."""
    return {
        "MASTER_ADDR": step.nodes[0],
        PORT_FILE_VARIABLE: str(AttemptFiles(RunDir(run_dir).logs, attempt).port),
        **variables_of_attempt(RunDir(run_dir).logs, attempt),
        "PYTHONUNBUFFERED": "1",
    }


def srun_command(
    step: Step, task: Sequence[str], mounts: Sequence[Path], workdir: Path
) -> list[str]:
    """The srun command line. A task that fails ends the others (--kill-on-bad-exit), but one that
    ends well does not:
    the others may still be saving (--wait=0)."""
    cluster = step.cluster
    command = ["srun", f"--nodes={step.num_nodes}", f"--ntasks={step.ranks}"]
    command += [f"--ntasks-per-node={step.tasks_per_node}"]
    command += [f"--cpus-per-task={cluster.cpus_per_rank}", f"--nodelist={','.join(step.nodes)}"]
    command += ["--kill-on-bad-exit=1", "--wait=0", "--label"]
    # --overlap: there is one attempt at a time. A step that Slurm believes to run, because the
    # slurmstepd that would end it was killed, must not keep the next one waiting.
    command += ["--distribution=block:block", "--export=ALL", "--overlap"]
    flags, line = in_container(cluster, task, mounts, workdir, step.python)
    return [*command, *flags, *option_flags(cluster.srun_options), *line]


def task_command(node: str, *command: str, flags: Sequence[str] = ()) -> list[str]:
    """The srun command line of one task on a node of the job, beside the job's other steps."""
    srun = ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={node}"]
    return [*srun, "--overlap", "--export=ALL", "--chdir=/", *flags, *command]


class SlurmRanks:
    """The ranks of one attempt, already started. All share the environment variables `variables`.

    `check_fence` raises StaleAttempt once a newer attempt has claimed the run. `can_lose_nodes`:
    whether spare nodes can replace those that do not respond, so that waiting for them is in vain.
    """

    def __init__(
        self,
        command: Sequence[str],
        step: Step,
        run_dir: RunDir,
        attempt: int,
        variables: Mapping[str, str],
        check_fence: Callable[[], None],
        can_lose_nodes: bool = False,
    ) -> None:
        self._check_fence = check_fence
        self._step = step
        self._can_lose_nodes = can_lose_nodes
        self._silent = SilentNodes(step.nodes)
        self.first_failure: int | None = None
        self.failed_nodes: list[str] = []  # by srun's or sinfo's word, known after `wait`
        files = AttemptFiles(run_dir.logs, attempt)
        files.create_meeting()
        self.logs = files.rank_logs(step.ranks)
        meeting = meeting_point(step, run_dir.path, attempt)
        task = rank_task(step.code, run_dir.path, attempt, command)
        line = srun_command(step, task, [run_dir.path], Path.cwd())
        self._log = files.srun_log
        with open(self._log, "ab", opener=own_file) as log:
            log.write(f"{shlex.join(line)}\n".encode())
            log.flush()
            parent = os.getpid()
            self._srun = subprocess.Popen(
                line,
                env={**os.environ, **meeting, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # If this supervisor is killed, the ranks save and stop: srun passes it on to them.
                preexec_fn=lambda: set_parent_death_signal(parent, SAVE_AND_STOP),
            )

    def wait(self, *, meanwhile: Callable[[], None]) -> list[int]:
        """Exit statuses in rank order, from the files the tasks wrote.

        Raises what the fence check raises.
        """
        rank_ends = RankEnds(self.logs)
        patience = SrunPatience(rank_ends, len(self.logs), self._are_lost)
        while self._srun.poll() is None:
            try:
                # If this node was cut off, Slurm has restarted the job elsewhere. An srun that is
                # left over here signals its step by number, and the next start's steps have the
                # same numbers: kill it silently.
                self._check_fence()
                meanwhile()
            except UserError:
                kill_silently(self._srun.pid)
                raise
            if patience.is_exhausted():
                self._end_srun(rank_ends)
            time.sleep(_POLL_SECONDS)
        rank_ends.look()
        rank_ends.read_rest()
        log = self._log.read_text(errors="replace")
        # Where a node failed, srun kills the ranks of the others, and names those alone.
        self.failed_nodes += failed_nodes(log)
        lost = self._step.first_rank_of(self.failed_nodes)
        of_ranks = first_failure(rank_ends.found, len(self.logs), log)
        self.first_failure = of_ranks if lost is None else lost
        return rank_ends.statuses()

    def terminate(self) -> None:
        self._srun.send_signal(SAVE_AND_STOP)

    def kill(self) -> None:
        self._srun.kill()

    def _are_lost(self, ranks: Sequence[int]) -> bool:
        return self._can_lose_nodes and self._nodes_of(ranks) <= self._silent.names()

    def _nodes_of(self, ranks: Iterable[int]) -> set[str]:
        return set(map(self._step.node_of, ranks))

    def _end_srun(self, ends: RankEnds) -> None:
        left = self._nodes_of(set(range(len(self.logs))) - set(ends.found))
        if left and left <= self._silent.names():
            self.failed_nodes = sorted(left)
            _log.warning(
                "srun still waits for %s, not responding: ending it", " ".join(sorted(left))
            )
        else:
            _log.warning("srun still waits although its ranks have ended: ending it")
        self._srun.terminate()  # it waits for its step as long as Slurm's KillWait
        try:
            self._srun.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._srun.kill()

    def describe_failure(self, statuses: Sequence[int]) -> str:
        if all(status == NEVER_STARTED for status in statuses):
            tail = "\n".join(f"  | {line}" for line in self.errors()[:_NUM_ERRORS])
            return f"no rank started; the first errors in {self._log}:\n{tail}"
        return describe_failure(statuses, self.logs, first_failure=self.first_failure)

    def errors(self) -> list[str]:
        """What srun and Slurm wrote about errors, first ones first."""
        return list(error_lines(self._log.read_text(errors="replace").splitlines()))


def kill_silently(srun: int) -> None:
    """Kill srun, and before it the helper process that would end the step by its number when srun
    dies."""
    helpers = Path(f"/proc/{srun}/task/{srun}/children")
    for pid in [*map(int, helpers.read_text().split()), srun]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def nodes_that_miss(step: Step, path: Path) -> list[str]:
    """The nodes of the step that do not see `path`."""
    test = ["bash", "-c", 'test -d "$0" || echo "$SLURMD_NODENAME"', str(path)]
    return sorted(_printed_by_each_node(step, ["--chdir=/"], test))


def nodes_that_cannot_start(step: Step, run_dir: Path) -> list[str]:
    """The nodes of the step on which Python does not start where the ranks would run."""
    own_name = ["-c", "import os; print(os.environ['SLURMD_NODENAME'])"]
    flags, line = in_container(step.cluster, own_name, [run_dir], Path.cwd(), step.python)
    flags += option_flags(step.cluster.srun_options)
    started = _printed_by_each_node(step, flags, line)
    return [node for node in step.nodes if node not in started]


def nodes_without_launch(nodes: Sequence[str]) -> list[str]:
    """Those of the nodes on which srun can launch no task, by its own words."""
    probes = {
        node: subprocess.Popen(
            task_command(node, "true"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in nodes
    }
    deadline = time.monotonic() + _PROBE_SECONDS
    return [node for node, probe in probes.items() if _names(probe, node, deadline)]


def _names(probe: subprocess.Popen[str], node: str, deadline: float) -> bool:
    """Whether a launch on the node fails; one that is not decided until then does not count."""
    try:
        _, said = probe.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        kill_silently(probe.pid)
        probe.communicate()
        return False
    return node in failed_nodes(said)


def _printed_by_each_node(step: Step, flags: Sequence[str], command: Sequence[str]) -> list[str]:
    """The words that a task on each node prints."""
    return run_on_each_node(step, flags, command).stdout.split()


def run_on_each_node(
    step: Step, flags: Sequence[str], command: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run a task on each node of the step; a failure of one leaves the others alone."""
    srun = ["srun", f"--nodes={step.num_nodes}", f"--ntasks={step.num_nodes}"]
    srun += [f"--nodelist={','.join(step.nodes)}"]
    srun += ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--overlap", "--export=ALL"]
    srun += [*flags, *command]
    return subprocess.run(srun, stdin=subprocess.DEVNULL, capture_output=True, text=True)
