"""`launcher resume`: continue a run the way it was started, in a new Slurm job or here."""

from __future__ import annotations

import argparse

from foundation.errors import ConfigError
from launcher.commands import local
from launcher.commands.submit import refuse_live_job
from launcher.restart_policy import RestartPolicy
from launcher.slurm import client as slurm
from launcher.slurm.job_checks import check_references
from launcher.slurm.sbatch import is_script_of
from launcher.slurm.snapshot import Snapshot
from launcher.status.slurm_queue import read_states
from launcher.sweep import was_array_task
from pretrain.costs.cluster import load_cluster
from pretrain.rundir.events import Submitted
from pretrain.rundir.ledger import last_of
from pretrain.rundir.run_dir import RunDir, refuse_foreign_run
from pretrain.rundir.run_paths import run_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher resume`."""
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")


def run(arguments: argparse.Namespace) -> int:
    """0 when its job is in the queue, or when the run has finished on this machine."""
    (state,) = read_states([arguments.run])
    if state.is_done:
        raise ConfigError(
            f"{arguments.run} is done after step {state.step:,}; to train further, start it again "
            "with more optim.steps"
        )
    refuse_foreign_run(arguments.run)
    if state.is_active:
        raise ConfigError(f"nothing to resume: {arguments.run} is {state.description}")
    if was_array_task(RunDir(arguments.run)):
        raise ConfigError(
            f"{arguments.run} is a cell of a sweep; 'launcher sweep submit' starts it again"
        )
    if Snapshot(arguments.run).script.is_file():
        return _submit_again(RunDir(arguments.run.resolve()))
    if state.job is not None:
        raise ConfigError(
            f"{arguments.run} was a Slurm job, and its {Snapshot(arguments.run).script} is gone; "
            "submit it again with 'launcher submit', or train here with 'launcher local'"
        )
    return local.run(
        argparse.Namespace(
            experiment=arguments.run / "config.yaml",
            overrides=[],
            ranks=state.ranks or 1,
            run_dir=arguments.run,
            attempts_without_progress=RestartPolicy.attempts_without_progress,
        )
    )


def _submit_again(run_dir: RunDir) -> int:
    """Submit the script again, with the code that was saved when the run was first submitted."""
    before = last_of(run_dir.ledger.read(), Submitted)
    if before is None:
        raise ConfigError(f"{run_dir.path} was never submitted; use 'launcher submit'")
    script = Snapshot(run_dir.path).script
    if not is_script_of(script.read_text(), run_dir.path):
        raise ConfigError(
            f"{script} was written for another run directory, so this one was moved or copied; "
            "submit it again: launcher submit EXPERIMENT --cluster CLUSTER "
            f"--run-dir {run_dir.path}"
        )
    check_references(load_cluster(Snapshot(run_dir.path).cluster))
    with run_dir.locked("submit"):
        refuse_live_job(before.job_name, run_dir.path)
        number = slurm.submit(script, before.job_name)
        run_dir.ledger.append(Submitted(job=number, job_name=before.job_name))
    print(f"job {number} ({before.job_name}) continues {run_dir.path}")
    print(f"Status: launcher status {run_dir.path}")
    return 0
