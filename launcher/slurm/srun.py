"""The ranks of one attempt as a step of the surrounding Slurm job: one task per rank."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import ConfigError, UserError
from launcher.slurm.cluster import ClusterConfig, in_container
from pretrain.processes.local_ranks import describe_failure, set_parent_death_signal
from pretrain.rundir.exit_status import EXIT_STOPPED
from pretrain.rundir.run_dir import RunDir

# srun forwards this to every rank. (srun itself ends on SIGTERM.)
SAVE_AND_STOP = signal.SIGUSR2
_LOST = -signal.SIGKILL  # a rank without a status file was killed together with its task
_POLL_SECONDS = 0.2
_NAMED_FIRST = re.compile(r"^srun: error: \S+: tasks? (\d+)", re.MULTILINE)
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


@dataclass(frozen=True, kw_only=True)
class Step:
    """What srun is asked for."""

    nodes: tuple[str, ...]  # all of the job's, in order
    num_nodes: int  # how many of them are used, from the first on
    ranks: int
    cluster: ClusterConfig

    @property
    def tasks_per_node(self) -> int:
        return self.ranks // self.num_nodes

    def node_of(self, rank: int) -> str:
        """Where a rank runs: with --distribution=block, srun fills one node after the other."""
        return self.nodes[rank // self.tasks_per_node]


def srun_command(step: Step, task: Sequence[str], mounts: Sequence[Path] = ()) -> list[str]:
    """The srun command line. A task that fails ends the others (--kill-on-bad-exit), but one that
    ends well does not:
    the others may still be saving (--wait=0)."""
    cluster = step.cluster
    command = [
        "srun",
        f"--nodes={step.num_nodes}",
        f"--ntasks={step.ranks}",
        f"--ntasks-per-node={step.tasks_per_node}",
    ]
    command += [
        f"--cpus-per-task={cluster.cpus_per_rank}",
        f"--nodelist={','.join(step.nodes[: step.num_nodes])}",
    ]
    command += ["--kill-on-bad-exit=1", "--wait=0", "--label", "--distribution=block"]
    flags, line = in_container(cluster, task, mounts, Path.cwd())
    return [*command, *flags, *line]


class SlurmRanks:
    """The ranks of one attempt, already started. All share the environment variables `variables`.

    `check_fence` raises StaleAttempt once a newer attempt has claimed the run.
    """

    def __init__(
        self,
        command: Sequence[str],
        step: Step,
        run_dir: RunDir,
        attempt: int,
        variables: Mapping[str, str],
        check_fence: Callable[[], None],
    ) -> None:
        self._check_fence = check_fence
        self.first_failure: int | None = None
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        self.logs = [
            run_dir.logs / f"attempt-{attempt}-rank-{rank}.log" for rank in range(step.ranks)
        ]
        task = [
            "-m",
            "launcher.slurm.task",
            str(run_dir.logs / f"attempt-{attempt}-rank-{{rank}}.log"),
            *command,
        ]
        meeting_point = {"MASTER_ADDR": step.nodes[0], "PYTHONUNBUFFERED": "1"}
        line = srun_command(step, task, mounts=[run_dir.path])
        self._log = run_dir.logs / f"attempt-{attempt}-srun.log"
        with open(self._log, "ab") as log:
            log.write(f"{shlex.join(line)}\n".encode())
            log.flush()
            parent = os.getpid()
            self._srun = subprocess.Popen(
                line,
                env={**os.environ, **meeting_point, **variables},
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
        while self._srun.poll() is None:
            try:
                # If this node was cut off, Slurm has restarted the job elsewhere. An srun that is
                # left over here signals its step by number, and the next start's steps have the
                # same numbers: kill it silently.
                self._check_fence()
                meanwhile()
            except UserError:
                _kill_silently(self._srun.pid)
                raise
            time.sleep(_POLL_SECONDS)
        written = {
            rank: file
            for rank, log in enumerate(self.logs)
            if (file := log.with_suffix(".status")).exists()
        }
        statuses = [
            int(written[rank].read_text()) if rank in written else _LOST
            for rank in range(len(self.logs))
        ]
        self.first_failure = _first_hand(
            statuses,
            {rank: file.stat().st_mtime for rank, file in written.items()},
            self._log.read_text(errors="replace"),
        )
        return statuses

    def terminate(self) -> None:
        self._srun.send_signal(SAVE_AND_STOP)

    def kill(self) -> None:
        self._srun.kill()

    def describe_failure(self, statuses: Sequence[int]) -> str:
        return describe_failure(statuses, self.logs, first_failure=self.first_failure)


def _kill_silently(srun: int) -> None:
    """Kill srun, and before it the helper process that would end the step by its number when srun
    dies."""
    helpers = Path(f"/proc/{srun}/task/{srun}/children")
    for pid in [*map(int, helpers.read_text().split()), srun]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def nodes_that_miss(step: Step, path: Path) -> list[str]:
    """The nodes of the step that do not see `path`."""
    command = [
        "srun",
        f"--nodes={step.num_nodes}",
        f"--ntasks={step.num_nodes}",
        "--ntasks-per-node=1",
        "--chdir=/",
    ]
    command += ["bash", "-c", 'test -d "$0" || echo "$SLURMD_NODENAME"', str(path)]
    return sorted(
        subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True
        ).stdout.split()
    )


def free_port_near(number: int) -> int:
    """A port derived from `number` that nothing listens on here; rank 0 runs on this node."""
    for offset in range(_NUM_PORTS):
        port = _FIRST_PORT + (number * 7 + offset) % _NUM_PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"found no free port from {_FIRST_PORT} to {_FIRST_PORT + _NUM_PORTS}; "
        "end some processes on this node"
    )


def _first_hand(statuses: Sequence[int], ended: Mapping[int, float], srun_log: str) -> int | None:
    """The rank whose failure made the others fail: one that was killed by a signal, else the first
    that failed.

    Ranks killed by SIGTERM do not count: srun ends the others that way. If no rank left a status,
    because its task could not even start, it is the first rank that srun names.
    """
    failed = [rank for rank in ended if statuses[rank] not in (0, EXIT_STOPPED, -signal.SIGTERM)]
    killed = [rank for rank in failed if statuses[rank] < 0]
    if failed:
        return min(killed or failed, key=lambda rank: ended[rank])
    named = _NAMED_FIRST.search(srun_log)
    any_failed = any(status not in (0, EXIT_STOPPED) for status in statuses)
    return int(named[1]) if named and any_failed else None
