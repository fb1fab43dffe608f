"""`launcher status`: the states of runs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from data_pipeline.errors import ConfigError
from launcher.status.run_state import is_run
from launcher.status.slurm_queue import read_states

_DEPTH = 3  # RUNS/RUN, RUNS/SWEEP/CELL
_WATCH_SECONDS = 5.0
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
    form.add_argument(
        "--watch", action="store_true", help=f"update every {_WATCH_SECONDS:g} s, until Ctrl-C"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the states of the runs; 0."""
    if arguments.all and arguments.runs:
        raise ConfigError("--all and the names of runs contradict each other; give one of them")
    if arguments.watch:
        return _watch(arguments)
    states = read_states(chosen(arguments))
    if arguments.json:
        for state in states:
            print(json.dumps({**asdict(state), "fraction_done": state.fraction_done}))
        return 0
    from launcher.commands.tables import console, render

    console().print(render(states, in_full=bool(arguments.runs)))
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


def _watch(arguments: argparse.Namespace) -> int:
    if not sys.stdout.isatty():
        raise ConfigError("--watch needs a terminal; leave it out, or use --json")
    from rich.console import RenderableType
    from rich.live import Live

    from launcher.commands.tables import console, render

    def table() -> RenderableType:
        return render(read_states(chosen(arguments)), in_full=bool(arguments.runs))

    try:
        with Live(table(), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_SECONDS)
                live.update(table(), refresh=True)
    except KeyboardInterrupt:
        return 0
