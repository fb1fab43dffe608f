"""`launcher submit`: checks a run against a cluster, saves its code and settings, submits it to
Slurm once. `launcher resume`: continues a run the way it was started, in a new job or here."""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import replace
from pathlib import Path

from foundation.cli import add_experiment
from foundation.errors import ConfigError
from foundation.files import make_directory, read_text
from foundation.settings import load_config
from launcher.commands import local
from launcher.restart_policy import RestartPolicy, add_policy_arguments, policy_of
from launcher.run_state import read_states
from launcher.slurm.client import Slurm
from launcher.slurm.sbatch import (
    Job,
    Snapshot,
    check_references,
    check_request,
    check_run,
    is_script_of,
    missing_notes,
    own_work_dirs,
    quote,
    render,
    replaced_snapshot,
)
from launcher.supervisor import is_done_already
from pretrain.checkpoint.facts import add_from_step
from pretrain.config.cluster import load_cluster, parse_nodes
from pretrain.config.resolve import with_absolute_paths, with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.rundir.events import Submitted
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir, refuse_foreign_run, run_path


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
    add_from_step(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the batch script; write and submit nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Submit; print the job and the run directory; 0."""
    policy = policy_of(arguments)  # ConfigError here rather than in the job
    config = with_absolute_paths(load_config(RunConfig, arguments.experiment, arguments.overrides))
    if arguments.name:
        config = replace(config, name=arguments.name)
    path = (arguments.run_dir or Path("runs") / config.name).resolve()
    quote(path)  # ConfigError now, unless a script can contain it
    job = Job(
        name=f"{config.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}",
        run_dir=path,
        code=Snapshot(path).code,
        python=sys.executable,
        nodes=parse_nodes(arguments.nodes),
        cluster=load_cluster(arguments.cluster),
        attempts_without_progress=policy.attempts_without_progress,
    )
    is_dry_run, known = arguments.dry_run, with_vocabulary(config)
    notes = missing_notes(config)
    notes += check_run(known, job.cluster, job.nodes, path, is_dry_run=is_dry_run)
    if is_done_already(RunDir(path), config) and arguments.from_step is None:
        raise ConfigError(
            f"{path} is done after step {config.optim.steps:,}; to train further, submit it with "
            "more optim.steps; for another run, give name=NEW or --run-dir DIR"
        )
    if is_dry_run:
        print(render(job), end="")
    else:
        number = submit(job, config, arguments.from_step)
        print(f"job {number} ({job.name}), run directory {path}")
        print(f"Status: launcher status {path}\nLogs:   launcher logs {path} --follow")
    for line in notes:
        print(line, file=sys.stderr)
    return 0


def submit(job: Job, config: RunConfig, from_step: int | None = None) -> str:
    """Save what the job runs, submit it once, record it in the ledger; returns the job's id."""
    run_dir, script, slurm = RunDir(job.run_dir), render(job), Slurm()
    check_request(job.cluster, job.nodes, slurm.retry_unreachable(slurm.partitions))
    existed = run_dir.path.exists()
    try:
        with run_dir.locked("submit"):
            refuse_live_job(slurm, run_dir)
            with replaced_snapshot(run_dir) as snapshot:
                snapshot.take_settings(config, job.cluster)
                snapshot.take_code(script)
                submitted = _submitted(slurm, run_dir, job.name, from_step)
            run_dir.ledger.append(submitted)
            return submitted.job
    except ConfigError:
        if not existed:
            run_dir.remove_unused()
        raise


def _submitted(slurm: Slurm, run_dir: RunDir, name: str, from_step: int | None) -> Submitted:
    """The event of the run's job, which is in the queue now."""
    snapshot = Snapshot(run_dir.path)
    if from_step is not None:
        run_dir.ask_to_resume_from(from_step)
    number, work_dir = slurm.submit(snapshot.script, str(snapshot.code))
    return Submitted(job=number, job_name=name, work_dir=work_dir)


def refuse_live_job(slurm: Slurm, run_dir: RunDir) -> None:
    """Raise ConfigError while a job, which may just be ending, has the run: one that works in its
    code, or the last one submitted, which the site may have moved to another directory."""
    ledger = run_dir.ledger.read()
    last, own = last_of(ledger, Submitted), own_work_dirs(run_dir.path, ledger)
    live = slurm.live_jobs(own[0])
    live += [job for job in slurm.jobs([last.job] if last else []) if job.is_live]
    for job in live:
        if job.work_dir in own:
            raise ConfigError(
                f"job {job.id} ({job.state.lower()}) has the run {run_dir.path} already; "
                f"wait for it, or end it: launcher cancel {run_dir.path}"
            )


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher resume`."""
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")
    add_from_step(parser)


def run_resume(arguments: argparse.Namespace) -> int:
    """0 when its job is in the queue, or when the run has finished on this machine."""
    path: Path = arguments.run
    (state,) = read_states([path])
    if state.is_done and arguments.from_step is None:
        raise ConfigError(
            f"{path} is done after step {state.step:,}; to train further, start it again with more "
            "optim.steps"
        )
    refuse_foreign_run(path)
    if state.is_active:
        raise ConfigError(f"nothing to resume: {path} is {state.description}")
    before, script = last_of(RunDir(path).ledger.read(), Submitted), Snapshot(path).script
    if before and "_" in before.job:
        raise ConfigError(f"{path} is a cell of a sweep; 'launcher sweep submit' starts it again")
    if script.is_file():
        return _submit_again(RunDir(path.resolve()), before, arguments.from_step)
    if state.job is not None:
        raise ConfigError(
            f"{path} was a Slurm job, and its {script} is gone; submit it again with 'launcher "
            "submit', or train here with 'launcher local'"
        )
    return local.run(
        argparse.Namespace(
            experiment=path / "config.yaml",
            overrides=[],
            ranks=state.ranks or 1,
            run_dir=path,
            attempts_without_progress=RestartPolicy.attempts_without_progress,
            from_step=arguments.from_step,
        )
    )


def _submit_again(run_dir: RunDir, before: Submitted | None, from_step: int | None) -> int:
    """Submit the script again, with the code that was saved when the run was first submitted."""
    if before is None:
        raise ConfigError(f"{run_dir.path} was never submitted; use 'launcher submit'")
    script = Snapshot(run_dir.path).script
    if not is_script_of(read_text(script), run_dir.path):
        raise ConfigError(
            f"{script} was written for another run directory, so this one was moved or copied; "
            "submit it again: launcher submit EXPERIMENT --cluster CLUSTER "
            f"--run-dir {run_dir.path}"
        )
    check_references(load_cluster(Snapshot(run_dir.path).cluster))
    slurm = Slurm()
    with run_dir.locked("submit"):
        refuse_live_job(slurm, run_dir)
        make_directory(run_dir.logs)  # Slurm starts no job that cannot write its log
        submitted = _submitted(slurm, run_dir, before.job_name, from_step)
        run_dir.ledger.append(submitted)
    print(f"job {submitted.job} ({before.job_name}) continues {run_dir.path}")
    print(f"Status: launcher status {run_dir.path}")
    return 0
