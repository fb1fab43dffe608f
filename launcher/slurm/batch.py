"""`launcher batch`: the supervisor inside a Slurm job. Written into the batch script by `launcher submit`."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError, UserError
from launcher.restart_policy import add_policy_arguments, policy_of
from launcher.slurm import client as slurm
from launcher.slurm.cluster import load_cluster
from launcher.slurm.job_checks import usable_nodes
from launcher.slurm.job_exit import JobExit, ThisJob
from launcher.slurm.job_history import (
    LOST_HOST,
    node_to_exclude,
    open_start,
    other_jobs,
    past_attempts,
)
from launcher.slurm.snapshot import Snapshot
from launcher.slurm.srun import SlurmRanks, Step, free_port_near, hosts_that_miss
from launcher.supervisor import StopSignals, newest_step, supervise
from pretrain.config.run import RunConfig
from pretrain.processes.local_ranks import EXIT_STOPPED
from pretrain.rundir.fence import VARIABLE, Fence, StaleAttempt
from pretrain.rundir.run_dir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher batch`."""
    parser.add_argument("run_dir", type=Path, help="the run's directory")
    add_policy_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train inside this job; after a stop that was announced the job goes back into the queue, unless cancelled."""
    job, run_dir = ThisJob.from_environment(), RunDir(arguments.run_dir)
    policy = policy_of(arguments)
    begin(job, run_dir)
    with StopSignals() as stop:
        claims = Claims(run_dir.path, f"{job.id}.{job.restart}")
        job_exit = JobExit(job, run_dir, stop, claims.check)
        past = past_attempts(run_dir.read_ledger(), job.id)
        tags = {"job": job.id}
        try:
            with run_dir.locked("launcher", is_fenced=True):
                start = starter(job, run_dir, job_exit, claims)
                status = supervise(
                    run_dir,
                    start,
                    policy,
                    stop,
                    _say,
                    past=past,
                    meanwhile=job_exit.look,
                    tags=tags,
                )
        except ExcludeNode as found:
            job_exit.leave(found.host)
            return EXIT_STOPPED
        except StaleAttempt:
            raise  # the journal is another's
        except UserError as error:
            job_exit.give_up(str(error))
            raise
        job_exit.finish(status)
    return status


class Claims:
    """This supervisor's claims on the run, one for each attempt: ranks of older ones can write no more."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir = run_dir
        self._name = name
        self._fence: Fence | None = None

    def claim(self, number: int) -> str:
        """Take the run for attempt `number`; its token."""
        self.check()
        self._fence = Fence(self._run_dir, f"{self._name}.{number}.{secrets.token_hex(2)}")
        self._fence.claim()
        return self._fence.token

    def check(self) -> None:
        """Raise StaleAttempt if another supervisor has claimed the run since."""
        if self._fence is not None:
            self._fence.check()


class ExcludeNode(Exception):
    """Another host may do better."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.host = host


def begin(job: ThisJob, run_dir: RunDir) -> None:
    """Note that this job has the run; ConfigError if another one that lives has it."""
    ledger, step = run_dir.read_ledger(), newest_step(run_dir)
    if lost := open_start(ledger, job.id):
        before = {
            "job": job.id,
            "restart": lost["restart"],
            "step_before": lost["step"],
            "step": step,
        }
        run_dir.append_ledger({"event": "job_ended", **before, "why": LOST_HOST, "requeued": True})
    run_dir.append_ledger(
        {"event": "job_started", **job.tags, "hosts": list(job.hosts), "step": step}
    )
    for other in slurm.jobs(other_jobs(run_dir.read_ledger(), job.id)):
        if other.is_live:
            why = f"refused: job {other.id} has the run"
            run_dir.append_ledger({"event": "job_ended", **job.tags, "why": why, "requeued": False})
            raise ConfigError(
                f"job {other.id} ({other.state.lower()}) has the run {run_dir.path}; "
                f"this job, {job.id}, ends: wait for that one, or end it first: scancel {other.id}"
            )


def starter(
    job: ThisJob, run_dir: RunDir, job_exit: JobExit, claims: Claims
) -> Callable[[int], SlurmRanks]:
    """Starts attempts as steps of this job."""
    snapshot = Snapshot(run_dir.path)
    config, cluster = load_config(RunConfig, snapshot.experiment), load_cluster(snapshot.cluster)
    nodes = usable_nodes(config, cluster.tasks_per_node, len(job.hosts))
    if not nodes:
        raise ConfigError(
            f"data.lanes={config.data.lanes} does not divide over the ranks of {len(job.hosts)} nodes"
        )
    if nodes < len(job.hosts):
        _say(
            f"using {nodes} of {len(job.hosts)} nodes, for data.lanes={config.data.lanes} to divide evenly"
        )
    step = Step(hosts=job.hosts, nodes=nodes, ranks=nodes * cluster.tasks_per_node, cluster=cluster)
    command = ["-m", "pretrain", "train", str(snapshot.experiment), "--run-dir", str(run_dir.path)]
    if blind := hosts_that_miss(step, run_dir.path):
        raise ConfigError(
            f"{', '.join(blind)} can not see {run_dir.path}; put the run on a disk that all hosts share"
        )

    def start(number: int) -> SlurmRanks:
        host = node_to_exclude(run_dir.read_ledger(), job.id, step)
        if host and job_exit.can_leave(host):
            raise ExcludeNode(host)
        shared = {
            VARIABLE: claims.claim(number),
            "MASTER_PORT": str(free_port_near(job.number + number)),
        }
        _say(f"attempt {number}: {step.ranks} ranks on {', '.join(job.hosts[:nodes])}")
        return SlurmRanks(command, step, run_dir, number, shared, claims.check)

    return start


def _say(line: str) -> None:
    print(line, flush=True)
