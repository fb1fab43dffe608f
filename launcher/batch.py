"""`launcher batch`: the supervisor inside a Slurm job. Written into the batch script by `launcher submit`."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from launcher import slurm
from launcher.cluster import load_cluster
from launcher.job_checks import usable_nodes
from launcher.requeue import Policy
from launcher.snapshot import Snapshot
from launcher.srun import SlurmRanks, Step, free_port_near
from launcher.supervisor import StopSignals, supervise
from pretrain.config import RunConfig
from pretrain.local_ranks import EXIT_STOPPED
from pretrain.run_dir import RunDir

_UNTIL_KILLED_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher batch`."""
    parser.add_argument("run_dir", type=Path, help="the run's directory")
    parser.add_argument("--attempts-without-progress", type=int, default=Policy.attempts_without_progress, metavar="K")


def run(arguments: argparse.Namespace) -> int:
    """Train inside this job; a stop that was announced requeues it, unless it was cancelled."""
    job, run_dir = slurm.own_job(), RunDir(arguments.run_dir)
    policy = Policy(attempts_without_progress=arguments.attempts_without_progress)
    with StopSignals() as stop, run_dir.locked("launcher"):
        signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
        status = supervise(run_dir, _starter(run_dir), policy, stop, _say)
    if status == EXIT_STOPPED and slurm.details(job).get("JobState") in ("RUNNING", "PREEMPTED"):
        _say("back into the queue")
        slurm.requeue(job)
        time.sleep(_UNTIL_KILLED_SECONDS)  # Slurm ends this process; an exit of its own would make the job COMPLETED
    return status


def _starter(run_dir: RunDir) -> Callable[[int], SlurmRanks]:
    snapshot = Snapshot(run_dir.path)
    config, cluster = load_config(RunConfig, snapshot.experiment), load_cluster(snapshot.cluster)
    hosts = tuple(slurm.host_names(os.environ["SLURM_JOB_NODELIST"]))
    nodes = usable_nodes(config, cluster.tasks_per_node, len(hosts))
    if not nodes:
        raise ConfigError(f"data.lanes={config.data.lanes} does not divide over the ranks of {len(hosts)} nodes")
    if nodes < len(hosts):
        _say(f"using {nodes} of {len(hosts)} nodes, for data.lanes={config.data.lanes} to divide evenly")
    step = Step(hosts=hosts, nodes=nodes, ranks=nodes * cluster.tasks_per_node, cluster=cluster)
    command = ["-m", "pretrain", "train", str(snapshot.experiment), "--run-dir", str(run_dir.path)]
    job = int(os.environ["SLURM_JOB_ID"])
    return lambda number: SlurmRanks(command, step, run_dir, number, free_port_near(job + number))


def _say(line: str) -> None:
    print(line, flush=True)
