"""`launcher resume`: go on with a run as it was started: in a new Slurm job, or on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.errors import ConfigError
from launcher.commands import local
from launcher.restart_policy import Policy
from launcher.slurm import client as slurm
from launcher.slurm.snapshot import Snapshot
from launcher.status.journal import last_of
from launcher.status.queue_state import read_states
from launcher.sweep.jobs import was_array_task
from pretrain.rundir.run_dir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher resume`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")


def run(arguments: argparse.Namespace) -> int:
    """0 when its job is in the queue, or when it has finished on this machine."""
    (state,) = read_states([arguments.run])
    if state.state == "done":
        raise ConfigError(
            f"{arguments.run} is done after step {state.step:,}; to train further, start it again with more optim.steps"
        )
    if state.state in ("running", "queued", "requeued", "preempted"):
        raise ConfigError(f"{arguments.run} is {state.describe} already; nothing to resume")
    if was_array_task(RunDir(arguments.run)):
        raise ConfigError(
            f"{arguments.run} is a cell of a sweep; 'launcher sweep submit' tries it again"
        )
    if Snapshot(arguments.run).script.is_file():
        return _submit_again(RunDir(arguments.run.resolve()))
    return local.run(
        argparse.Namespace(
            experiment=arguments.run / "config.yaml",
            overrides=[],
            ranks=state.ranks or 1,
            run_dir=arguments.run,
            attempts_without_progress=Policy.attempts_without_progress,
        )
    )


def _submit_again(run_dir: RunDir) -> int:
    """The script and the code that were kept when the run was submitted."""
    before = last_of(run_dir.read_ledger(), "submitted")
    if before is None:
        raise ConfigError(
            f"{run_dir.path} was never submitted; hand it over with 'launcher submit'"
        )
    with run_dir.locked("submit"):
        number = slurm.submit(Snapshot(run_dir.path).script, before["job_name"])
        run_dir.append_ledger({"event": "submitted", "job": number, "job_name": before["job_name"]})
    print(f"job {number} ({before['job_name']}) goes on with {run_dir.path}")
    print(f"how it stands: launcher status {run_dir.path}")
    return 0
