"""`launcher resume`: continues a run the way it was started, in a new job or on this machine."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from foundation.cli import add_overrides, as_overrides, check_least
from foundation.errors import ConfigError
from foundation.settings import differences, load_config
from foundation.typed_values import to_tree
from launcher.local_run import train_here
from launcher.run_state import read_states
from launcher.slurm.sbatch import Snapshot
from launcher.slurm.submission import submit_again
from launcher.supervisor import is_complete
from pretrain.checkpoint.facts import add_from_step
from pretrain.config.run import OF_RATE, RunConfig
from pretrain.rundir.events import Submitted
from pretrain.rundir.history import last_event
from pretrain.rundir.ownership import refuse_foreign_run
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path
from pretrain.sweeps.cell_runs import other_settings
from pretrain.terminal.log import set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher resume`."""
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")
    add_overrides(parser, "settings to change, such as optim.learning_rate=1e-4")
    words = "processes on this machine (default: as before)"
    parser.add_argument("--ranks", type=int, metavar="N", help=words)
    add_from_step(parser)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 when its job is in the queue, or when the run has finished on this machine."""
    check_least(arguments, 1, "ranks")
    return resume(arguments.run, arguments.from_step, arguments.overrides, arguments.ranks)


def gives_rate(override: str) -> bool:
    """Return whether an override has a part of the rate's course: rate, schedule or steps."""
    return override.startswith(OF_RATE)


def course_at(run_dir: RunDir, step: int) -> list[str]:
    """Return the overrides that give the run the course of its rate that it had at a step.

    What is given with an older step changes that course, and not a later one.
    """
    later = differences(*map(to_tree, (run_dir.config, run_dir.settings_at(step))))
    return [as_overrides({name: then}) for name, (_, then) in later.items() if gives_rate(name)]


def resume(
    path: Path,
    from_step: int | None = None,
    overrides: Sequence[str] = (),
    ranks: int | None = None,
) -> int:
    """Continue the run in this directory, from this step if one is given, with these settings."""
    (state,) = read_states([path])
    if from_step is not None and any(map(gives_rate, overrides)):
        overrides = [*course_at(RunDir(path), from_step), *overrides]
    if overrides and (path.absolute().parent / "sweep.lock").exists():
        config = load_config(RunConfig, path / "config.yaml", overrides)
        if other := other_settings(path, config):
            raise ConfigError(
                f"{path} is a cell of a sweep, which would not count it with {other}; leave it and "
                f"train a copy: 'pretrain branch {path}@last NEW {' '.join(overrides)}'"
            )
    steps_are_made = state.is_done and is_complete(
        RunDir(path), load_config(RunConfig, path / "config.yaml", overrides)
    )
    if steps_are_made and from_step is None:
        raise ConfigError(
            f"{path} is done after step {state.step:,}; to train further, give it more optim.steps"
        )
    refuse_foreign_run(path)
    if state.is_active:
        stop = f"; to change its settings, first 'launcher cancel {path}'" if overrides else ""
        raise ConfigError(f"nothing to resume: {path} is {state.description}{stop}")
    before, script = last_event(RunDir(path).ledger.read(), Submitted), Snapshot(path).script
    if before and "_" in before.job:
        raise ConfigError(f"{path} is a cell of a sweep; 'launcher sweep submit' starts it again")
    if script.is_file():
        if ranks is not None:
            raise ConfigError(
                f"--ranks={ranks}: {path} is a Slurm job, whose nodes say how many; "
                "'launcher submit --nodes N' changes it"
            )
        path = path.resolve()
        submitted = submit_again(RunDir(path), before, from_step, overrides)
        print(f"job {submitted.job} ({submitted.job_name}) continues {path}")
        print(f"Status: launcher status {path}")
        return 0
    if state.job is not None:
        raise ConfigError(
            f"{path} was a Slurm job, and its {script} is gone; submit it again with 'launcher "
            "submit', or train here with 'launcher local'"
        )
    set_up_logging("supervisor")
    ranks = ranks or state.ranks or 1
    return train_here(path / "config.yaml", path, ranks, overrides, from_step=from_step)
