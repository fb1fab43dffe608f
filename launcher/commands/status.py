"""`launcher status`: the states of runs."""

import argparse
from pathlib import Path

from foundation.errors import ConfigError
from foundation.typed_values import json_text
from launcher.run_state import is_run, read_states
from launcher.status_tables import console, one_run, runs_table
from pretrain.rundir.run_paths import RUNS, run_path
from pretrain.sweeps.cell_runs import find_runs, runs_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher status`."""
    add = parser.add_argument
    words = "runs, their names in runs/, sweeps or folders of runs (default: all of --runs-dir)"
    add("runs", nargs="*", type=run_path, metavar="RUN", help=words)
    add("--runs-dir", type=Path, default=RUNS, help="folder of all runs (default %(default)s)")
    add("--json", action="store_true", help="one JSON object per run and line, for scripts")


def run(arguments: argparse.Namespace) -> int:
    """Print the states of the runs; return 0."""
    runs = arguments.runs
    paths = runs_of(runs, is_run) if runs else list(find_runs(arguments.runs_dir, is_run))
    if not paths:
        raise ConfigError(f"{arguments.runs_dir} contains no runs; name one, or set --runs-dir")
    states = read_states(paths)
    if arguments.json:
        for state in states:
            print(json_text(state.tree))
    else:
        is_alone = runs and len(states) == 1
        console().print(one_run(states[0]) if is_alone else runs_table(states, arguments.runs_dir))
    return 0
