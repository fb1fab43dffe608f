"""`launcher submit`: checks a run against a cluster, saves its code and settings, submits it to
Slurm once."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foundation.cli import add_experiment
from foundation.errors import ConfigError
from foundation.settings import load_config
from launcher.restart_policy import add_policy_arguments, policy_of
from launcher.slurm import client as slurm
from launcher.slurm.job_checks import (
    check_request,
    check_run,
    missing_notes,
)
from launcher.slurm.sbatch import Job, quote, render
from launcher.slurm.snapshot import Snapshot, replaced_snapshot
from launcher.supervisor import is_done_already
from pretrain.config.resolve import with_absolute_paths, with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import load_cluster, parse_nodes
from pretrain.rundir.events import Submitted
from pretrain.rundir.run_dir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher submit`."""
    add_experiment(parser)
    parser.add_argument(
        "--cluster", type=Path, required=True, help="cluster file (configs/clusters/*.yaml)"
    )
    parser.add_argument(
        "--nodes",
        default="1",
        metavar="N|A:B|N+S",
        help="nodes; 4:16 takes what is free, 4+1 has a spare one (default 1)",
    )
    parser.add_argument("--name", help="name of the run (default: the experiment's)")
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="run directory, on a disk that all nodes share (default runs/NAME)",
    )
    add_policy_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the batch script; write and submit nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Submit; print the job and the run directory; 0."""
    policy_of(arguments)  # ConfigError here rather than in the job
    config = with_absolute_paths(load_config(RunConfig, arguments.experiment, arguments.overrides))
    if arguments.name:
        config = replace(config, name=arguments.name)
    job = planned(arguments, config)
    notes = missing_notes(config)
    notes += check_run(
        with_vocabulary(config),
        job.cluster,
        job.nodes,
        job.run_dir,
        is_dry_run=arguments.dry_run,
    )
    if arguments.dry_run:
        refuse_done(job, config)
        print(render(job), end="")
        _print_notes(notes)
        return 0
    number = submit(job, config)
    _print_notes(notes)
    print(f"job {number} ({job.name}), run directory {job.run_dir}")
    print(f"Status: launcher status {job.run_dir}\nLogs:   launcher logs {job.run_dir} --follow")
    return 0


def _print_notes(notes: Sequence[str]) -> None:
    for line in notes:
        print(line, file=sys.stderr)


def planned(arguments: argparse.Namespace, config: RunConfig) -> Job:
    """The job that the command line asks for."""
    run_dir = (arguments.run_dir or Path("runs") / config.name).resolve()
    quote(run_dir)  # ConfigError now, unless a script can contain it
    return Job(
        name=job_name(config.name, run_dir),
        run_dir=run_dir,
        code=Snapshot(run_dir).code,
        python=sys.executable,
        nodes=parse_nodes(arguments.nodes),
        cluster=load_cluster(arguments.cluster),
        attempts_without_progress=arguments.attempts_without_progress,
    )


def job_name(name: str, run_dir: Path) -> str:
    """One name for one run directory: it finds a run's job even if the job's number was lost."""
    return f"{name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}"


def refuse_done(job: Job, config: RunConfig) -> None:
    """Raise ConfigError if the run has made all its steps."""
    if is_done_already(RunDir(job.run_dir), config):
        raise ConfigError(
            f"{job.run_dir} is done after step {config.optim.steps:,}; to train further, submit "
            "it with more optim.steps; for another run, give name=NEW or --run-dir DIR"
        )


def submit(job: Job, config: RunConfig) -> str:
    """Save what the job runs, submit it once, record it in the ledger; returns the job's id."""
    run_dir, script = RunDir(job.run_dir), render(job)
    refuse_done(job, config)
    check_request(job.cluster, job.nodes, slurm.retry_unreachable(slurm.partitions))
    existed = run_dir.path.exists()
    try:
        with run_dir.locked("submit"):
            refuse_live_job(job.name, job.run_dir)
            with replaced_snapshot(run_dir) as snapshot:
                snapshot.take(config, job.cluster, script)
                number = slurm.submit(snapshot.script, job.name)
            run_dir.ledger.append(Submitted(job=number, job_name=job.name))
            return number
    except ConfigError:
        if not existed:
            run_dir.remove_unused()
        raise


def refuse_live_job(name: str, run_dir: Path) -> None:
    """Raise ConfigError while a job of this name, which may just be ending, has the run."""
    if live := slurm.live_jobs(name):
        raise ConfigError(
            f"job {live[0].id} ({live[0].state.lower()}) has the run {run_dir} already; "
            f"wait for it, or end it: scancel {live[0].id}"
        )
