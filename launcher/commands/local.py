"""`launcher local`: the ranks of a run on this machine, under the supervisor."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from foundation.cli import add_experiment, check_least
from foundation.settings import load_config
from launcher.restart_policy import add_policy_arguments, policy_of
from launcher.stop_signals import HOLDER, StopSignals
from launcher.supervisor import is_done_already, supervise
from pretrain.checkpoint.facts import add_from_step
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.rundir.run_dir import RunDir, refuse_foreign_run
from pretrain.terminal.log import add_log_level_argument, set_up_logging
from pretrain.terminal.text import counted

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher local`."""
    add_experiment(parser)
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes on this machine (default %(default)s)"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="run directory; resumed if it contains this run (default runs/NAME)",
    )
    add_policy_arguments(parser)
    add_from_step(parser)
    add_log_level_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train until the run is finished.

    Returns 0 then, 75 if stopped on request, 2 if the run was refused or given up.
    """
    set_up_logging("supervisor", getattr(arguments, "log_level", None))
    check_least(arguments, 1, "ranks")
    policy = policy_of(arguments)
    config = load_config(RunConfig, arguments.experiment, arguments.overrides)
    accumulation_steps(config, arguments.ranks)  # ConfigError before anything starts
    path, stop = arguments.run_dir or Path("runs") / config.name, StopSignals()
    run_dir = RunDir(path, stop.patience(config.checkpoint.storage_patience_seconds))
    command = train_command(arguments.experiment, run_dir.path, *arguments.overrides)
    existed = run_dir.path.exists()
    refuse_foreign_run(run_dir.path)
    # Before any rank starts: what is refused must leave no failed attempt in the ledger.
    is_done, from_step = is_done_already(run_dir, with_absolute_paths(config)), arguments.from_step
    if is_done and from_step is None:
        _log.info(
            "%s is done; to train further, give it more optim.steps; for another run, name=NEW",
            run_dir.path,
        )
        return 0
    try:
        with stop, run_dir.locked(HOLDER):
            if from_step is not None:
                run_dir.ask_to_resume_from(from_step)
            return supervise(run_dir, starter(command, arguments.ranks, run_dir), policy, stop)
    finally:
        if not existed and not run_dir.exists():
            run_dir.remove_unused()


def starter(command: Sequence[str], num_ranks: int, run_dir: RunDir) -> Callable[[int], RankGroup]:
    """Returns the function that starts attempts of `command`; rank 0's output is repeated here."""

    def start(number: int) -> RankGroup:
        ranks = RankGroup(command, num_ranks, run_dir.logs, number, echo_rank_zero=True)
        pids = " ".join(map(str, ranks.pids))
        _log.info("attempt %d: %s, processes %s", number, counted(num_ranks, "rank"), pids)
        return ranks

    return start
