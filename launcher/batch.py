"""`launcher batch`: the supervisor inside a Slurm job. Written into the batch script by `launcher submit`."""

from __future__ import annotations

import argparse
import math
import os
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from launcher import slurm
from launcher.cluster import load_cluster
from launcher.job_checks import usable_nodes
from launcher.job_end import JobEnd, end_of
from launcher.job_history import LOST_HOST, open_start, other_jobs, past_attempts
from launcher.requeue import Policy
from launcher.snapshot import Snapshot
from launcher.srun import SlurmRanks, Step, free_port_near
from launcher.supervisor import StopSignals, newest_step, supervise
from pretrain.config import RunConfig
from pretrain.fence import VARIABLE, Fence
from pretrain.local_ranks import EXIT_STOPPED
from pretrain.run_dir import RunDir

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher batch`."""
    parser.add_argument("run_dir", type=Path, help="the run's directory")
    parser.add_argument("--attempts-without-progress", type=int, default=Policy.attempts_without_progress, metavar="K")


def run(arguments: argparse.Namespace) -> int:
    """Train inside this job; after a stop that was announced the job goes back into the queue, unless cancelled."""
    job, run_dir = ThisJob.from_environment(), RunDir(arguments.run_dir)
    policy = Policy(attempts_without_progress=arguments.attempts_without_progress)
    begin(job, run_dir)
    with StopSignals() as stop, run_dir.locked("launcher", is_fenced=True):
        farewell = Farewell(job, run_dir, stop)
        past = past_attempts(run_dir.read_ledger(), job.id)
        status = supervise(
            run_dir, starter(job, run_dir), policy, stop, _say, past=past, meanwhile=farewell.look, tags={"job": job.id}
        )
        farewell.finish(status)
    return status


@dataclass(frozen=True, kw_only=True)
class ThisJob:
    """The Slurm job, or task of an array, that this process is the batch script of."""

    id: str  # 17, or 17_3
    number: int  # one of its own for a task, too
    restart: int
    hosts: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> ThisJob:
        return cls(
            id=slurm.own_job(),
            number=int(os.environ["SLURM_JOB_ID"]),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            hosts=tuple(slurm.host_names(os.environ["SLURM_JOB_NODELIST"])),
        )

    @property
    def tags(self) -> dict[str, Any]:
        """What marks its events in the journal."""
        return {"job": self.id, "restart": self.restart}


def begin(job: ThisJob, run_dir: RunDir) -> None:
    """Note that this job has the run; ConfigError if another one that lives has it."""
    ledger, step = run_dir.read_ledger(), newest_step(run_dir)
    if lost := open_start(ledger, job.id):
        before = {"job": job.id, "restart": lost["restart"], "step_before": lost["step"], "step": step}
        run_dir.append_ledger({"event": "job_ended", **before, "why": LOST_HOST, "requeued": True})
    run_dir.append_ledger({"event": "job_started", **job.tags, "hosts": list(job.hosts), "step": step})
    for other in slurm.jobs(other_jobs(run_dir.read_ledger(), job.id)):
        if other.is_live:
            why = f"refused: job {other.id} has the run"
            run_dir.append_ledger({"event": "job_ended", **job.tags, "why": why, "requeued": False})
            raise ConfigError(
                f"job {other.id} ({other.state.lower()}) has the run {run_dir.path}; "
                f"this job, {job.id}, ends: wait for that one, or end it first: scancel {other.id}"
            )


def starter(job: ThisJob, run_dir: RunDir) -> Callable[[int], SlurmRanks]:
    """Starts attempts as steps of this job; each claims the run, so that ranks of older ones can write no more."""
    snapshot = Snapshot(run_dir.path)
    config, cluster = load_config(RunConfig, snapshot.experiment), load_cluster(snapshot.cluster)
    nodes = usable_nodes(config, cluster.tasks_per_node, len(job.hosts))
    if not nodes:
        raise ConfigError(f"data.lanes={config.data.lanes} does not divide over the ranks of {len(job.hosts)} nodes")
    if nodes < len(job.hosts):
        _say(f"using {nodes} of {len(job.hosts)} nodes, for data.lanes={config.data.lanes} to divide evenly")
    step = Step(hosts=job.hosts, nodes=nodes, ranks=nodes * cluster.tasks_per_node, cluster=cluster)
    command = ["-m", "pretrain", "train", str(snapshot.experiment), "--run-dir", str(run_dir.path)]
    fences: list[Fence] = []

    def start(number: int) -> SlurmRanks:
        if fences:
            fences[-1].check()  # another job may have taken over since
        fences.append(Fence(run_dir.path, f"{job.id}.{job.restart}.{number}.{secrets.token_hex(2)}"))
        fences[-1].claim()
        shared = {"MASTER_PORT": str(free_port_near(job.number + number)), VARIABLE: fences[-1].token}
        _say(f"attempt {number}: {step.ranks} ranks on {', '.join(job.hosts[:nodes])}")
        return SlurmRanks(command, step, run_dir, number, shared)

    return start


class Farewell:
    """Finds out why the job ends, notes it, and puts the job back into the queue where that is ours to do. Once."""

    def __init__(self, job: ThisJob, run_dir: RunDir, stop: StopSignals) -> None:
        self._job = job
        self._run_dir = run_dir
        self._stop = stop
        self._looked_at = 0
        self._is_said = False

    def look(self) -> None:
        """To be called often: some ends leave seconds until Slurm kills this process."""
        received = self._stop.received[self._looked_at :]
        self._looked_at += len(received)
        if signal.SIGTERM in received and not self._is_said:
            end = self._end()
            if end.at_once or not end.requeue:
                self._say(end)

    def finish(self, status: int) -> None:
        """After the last attempt, which ended with `status`."""
        if self._is_said:
            return
        if status == EXIT_STOPPED:
            self._say(self._end())
        else:
            self._say(JobEnd("finished" if status == 0 else "gave up or refused", requeue=False))

    def _end(self) -> JobEnd:
        warned = signal.SIGUSR1 in self._stop.received
        fields = _patiently(lambda: slurm.details(self._job.id))
        log = "".join(_tail(path) for path in sorted(self._run_dir.logs.glob("attempt-*-srun.log"))[-1:])
        return end_of(fields, self._job.restart, log + _tail(Path(fields.get("StdOut", "/dev/null"))), warned)

    def _say(self, end: JobEnd) -> None:
        self._is_said = True
        event = {"event": "job_ended", **self._job.tags, "why": end.why, "requeued": end.requeue}
        self._run_dir.append_ledger(event)
        _say(f"job {self._job.id} ends: {end.why}" + ("; back into the queue" if end.requeue else ""))
        if end.requeue:
            _patiently(lambda: slurm.requeue(self._job.id))


def _patiently(ask: Callable[[], T]) -> T:
    """What Slurm answers, however long its controller is away: Slurm ends this process when it is time."""
    return slurm.patiently(ask, _say, patience=math.inf)


def _tail(path: Path, size: int = 8192) -> str:
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def _say(line: str) -> None:
    print(line, flush=True)
