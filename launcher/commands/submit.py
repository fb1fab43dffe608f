"""`launcher submit`: checks a run against a cluster, saves its code and settings, and submits it to
Slurm, once."""

import argparse
import hashlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from foundation.cli import add_experiment
from foundation.errors import ConfigError
from foundation.settings import load_config
from launcher.restart_policy import add_policy_arguments, requested_policy
from launcher.slurm.sbatch import (
    Job,
    Snapshot,
    check_run,
    cluster_here,
    missing_notes,
    quote,
    render,
    resolve_here,
)
from launcher.slurm.srun import Step, attempt_command
from launcher.slurm.submission import submit
from launcher.supervisor import is_done_already
from pretrain.checkpoint.facts import add_from_step
from pretrain.config.cluster import parse_nodes
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import RunConfig
from pretrain.rundir.attempt_files import AttemptFiles
from pretrain.rundir.run_dir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher submit`."""
    add_experiment(parser)
    add = parser.add_argument
    add("--cluster", type=Path, required=True, help="cluster file (configs/clusters/*.yaml)")
    words = "nodes; 4:16 takes what is free, 4+1 has a spare one (default 1)"
    add("--nodes", default="1", metavar="N|A:B|N+S", help=words)
    add("--name", help="name of the run (default: the experiment's)")
    add("--run-dir", type=Path, help="on a disk that all nodes share (default runs/NAME)")
    add_policy_arguments(parser)
    add_from_step(parser)
    words = "forecast card, whose hash goes into the ledger before the run's first start"
    add("--forecast", type=Path, metavar="CARD", help=words)
    add("--dry-run", action="store_true", help="print the batch script; write and submit nothing")


def run(arguments: argparse.Namespace) -> int:
    """Submit; print the job and the run directory; return 0."""
    policy = requested_policy(arguments)  # ConfigError here rather than in the job
    config = with_absolute_paths(load_config(RunConfig, arguments.experiment, arguments.overrides))
    if arguments.name:
        config = replace(config, name=arguments.name)
    path = (arguments.run_dir or Path("runs") / config.name).resolve()
    quote(path)  # ConfigError now if no script can contain this path
    job = Job(
        name=f"{config.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}",
        run_dir=path,
        code=Snapshot(path).code,
        python=sys.executable,
        nodes=parse_nodes(arguments.nodes),
        cluster=cluster_here(arguments.cluster),
        attempts_without_progress=policy.attempts_without_progress,
    )
    is_dry_run, known = arguments.dry_run, resolve_here(config)
    notes = missing_notes(config, job.cluster, path)
    notes += check_run(known, job.cluster, job.nodes, path, is_dry_run=is_dry_run)
    if is_done_already(RunDir(path), config, arguments.from_step, arguments.overrides):
        done = f"{path} is done after step {config.optim.steps:,}"
        raise ConfigError(f"{done}; give it more optim.steps, or name=NEW for another run")
    if is_dry_run:
        print(render(job), end="")
        if job.cluster.container_image:  # the batch script does not show it
            nodes = tuple(f"NODE{number}" for number in range(job.nodes.least))
            step = Step(
                nodes=nodes, ranks=job.cluster.tasks_per_node * len(nodes), cluster=job.cluster
            )
            files = AttemptFiles(RunDir(path).logs, 0)
            line = attempt_command(step, RunDir(path), files, job.code, job.code)
            print(f"# Its supervisor starts the ranks by: {shlex.join(line)}")
    else:
        number = submit(job, config, arguments.from_step, arguments.forecast)
        print(f"job {number} ({job.name}), run directory {path}")
        print(f"Status: launcher status {path}\nLogs:   launcher logs {path} --follow")
    for line in notes:
        print(line, file=sys.stderr)
    return 0
