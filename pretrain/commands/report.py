"""`pretrain report`: a run, or several side by side, as one self-contained page and figures."""

import argparse
from pathlib import Path

from foundation.cli import Answer, add_json, check_output_directory
from pretrain.reporting.run_history import read_histories
from pretrain.reporting.run_page import write_comparison, write_report
from pretrain.rundir.run_paths import run_path
from pretrain.rundir.run_step import run_step
from pretrain.sweeps.cell_runs import runs_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain report`."""
    add = parser.add_argument
    add(
        "runs",
        type=run_path,
        nargs="+",
        metavar="RUN",
        help="run(s), RUN@STEP, a sweep file, or a folder",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="default: RUN or RUN/at-STEP; for several runs, their parent",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Write the page of one run, or of several side by side."""
    if arguments.output:
        check_output_directory("--output", arguments.output)
    paths = runs_of(arguments.runs)
    histories = read_histories(paths)
    run, step = run_step(paths[0])
    if len(paths) == 1:
        own = run if step is None else run / f"at-{step}"
        return write_report(histories[0], arguments.output or own)
    return write_comparison(histories, arguments.output or run.parent)
