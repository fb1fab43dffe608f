"""`launcher status`: the states of runs."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.errors import ConfigError
from launcher.commands.watch import add_watch_argument, watch
from launcher.status.run_state import is_run
from launcher.status.slurm_queue import read_states

if TYPE_CHECKING:
    from rich.console import Group

    from launcher.commands.tables import RunsTable

_DEPTH = 3  # RUNS/RUN, RUNS/SWEEP/CELL
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher status`."""
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="run directories (default: --all)"
    )
    parser.add_argument("--all", action="store_true", help="every run under --runs-dir")
    parser.add_argument(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        help="where --all looks (default %(default)s)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="one JSON object per run and line, for scripts"
    )
    add_watch_argument(form)


def run(arguments: argparse.Namespace) -> int:
    """Print the states of the runs; 0."""
    if arguments.all and arguments.runs:
        raise ConfigError("--all and the names of runs contradict each other; give one of them")
    if arguments.json:
        for state in read_states(chosen(arguments)):
            print(json.dumps(state.tree))
        return 0
    from launcher.commands.tables import console, render

    def table() -> Group | RunsTable:
        return render(read_states(chosen(arguments)), in_full=bool(arguments.runs))

    if arguments.watch:
        return watch(table)
    console().print(table())
    return 0


def chosen(arguments: argparse.Namespace) -> list[Path]:
    """The run directories to show; ConfigError if there are none."""
    if arguments.runs:
        return arguments.runs
    found = sorted(find_runs(arguments.runs_dir))
    if not found:
        raise ConfigError(f"{arguments.runs_dir} contains no runs; name one, or set --runs-dir")
    return found


def find_runs(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Run directories at or under `root`; runs are not searched for other runs.

    A directory that this user may not read is passed over, with a warning.
    """
    try:
        if is_run(root):
            yield root
            return
        entries = list(root.iterdir()) if depth and root.is_dir() else []
    except OSError as error:
        _log.warning("%s cannot be searched for runs: %s", root, error.strerror)
        return
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith("."):
            yield from find_runs(entry, depth - 1)
