"""`launcher status`: the states of runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from foundation.errors import ConfigError
from launcher.status.run_state import is_run
from launcher.status.slurm_queue import read_states
from pretrain.rundir.run_paths import RUNS, run_path
from pretrain.scaling.which_runs import find_runs, runs_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher status`."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=run_path,
        metavar="RUN",
        help="runs, their names in runs/, sweeps or folders of runs (default: --all)",
    )
    parser.add_argument("--all", action="store_true", help="every run under --runs-dir")
    parser.add_argument(
        "--runs-dir",
        type=Path,
        default=RUNS,
        help="where --all looks (default %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per run and line, for scripts"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the states of the runs; 0."""
    if arguments.all and arguments.runs:
        raise ConfigError("--all and the names of runs contradict each other; give one of them")
    if arguments.json:
        for state in read_states(chosen(arguments)):
            print(json.dumps(state.tree))
        return 0
    from launcher.commands.tables import console, render

    console().print(render(read_states(chosen(arguments)), in_full=bool(arguments.runs)))
    return 0


def chosen(arguments: argparse.Namespace) -> list[Path]:
    """The run directories to show; ConfigError if there are none."""
    if arguments.runs:
        return runs_of(arguments.runs, is_run)
    found = list(find_runs(arguments.runs_dir, is_run))
    if not found:
        raise ConfigError(f"{arguments.runs_dir} contains no runs; name one, or set --runs-dir")
    return found
