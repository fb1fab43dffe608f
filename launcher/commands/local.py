"""`launcher local`: the ranks of a run on this machine, under the supervisor."""

import argparse
from pathlib import Path

from foundation.cli import add_experiment, check_least
from launcher.local_run import train_here
from launcher.restart_policy import add_policy_arguments, requested_policy
from pretrain.checkpoint.facts import add_from_step
from pretrain.terminal.log import add_log_level_argument, set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher local`."""
    add_experiment(parser)
    add = parser.add_argument
    add("--ranks", type=int, default=1, help="processes on this machine (default %(default)s)")
    add("--run-dir", type=Path, help="resumed if it contains this run (default runs/NAME)")
    add_policy_arguments(parser)
    add_from_step(parser)
    words = "forecast card, whose hash goes into the ledger before the run's first start"
    add("--forecast", type=Path, metavar="CARD", help=words)
    add_log_level_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 when the run is finished, 75 if stopped on request, 2 if refused or given up."""
    set_up_logging("supervisor", arguments.log_level)
    check_least(arguments, 1, "ranks")
    return train_here(
        arguments.experiment,
        arguments.run_dir,
        arguments.ranks,
        arguments.overrides,
        requested_policy(arguments),
        arguments.from_step,
        arguments.forecast,
    )
