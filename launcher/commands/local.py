"""`launcher local`: the ranks of a run on this machine, under the supervisor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from launcher.restart_policy import add_policy_arguments, policy_of
from launcher.supervisor import StopSignals, supervise
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.processes.local_ranks import RankGroup, describe_failure
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.live_bar import live_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher local`."""
    parser.add_argument("experiment", type=Path, help="experiment file (YAML)")
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes on this machine (default %(default)s)"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="where all goes; resumed if it holds this run (default runs/NAME)",
    )
    add_policy_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train until the run is finished; 0 then, 75 when stopped on request, 2 when refused or given up."""
    if arguments.ranks < 1:
        raise ConfigError(f"--ranks={arguments.ranks} must be 1 or more")
    policy = policy_of(arguments)
    config = load_config(RunConfig, arguments.experiment, arguments.overrides)
    accumulation_steps(
        config, arguments.ranks
    )  # lanes that do not divide are refused before anything starts
    run_dir = RunDir(arguments.run_dir or Path("runs") / config.name)
    command = train_command(arguments.experiment, run_dir, arguments.overrides)
    existed = run_dir.path.exists()
    with StopSignals() as stop, run_dir.locked("launcher"), live_bar():
        status = supervise(run_dir, starter(command, arguments.ranks, run_dir), policy, stop, _say)
    if not existed and not run_dir.exists():
        _remove_refused(run_dir)
    return status


def train_command(experiment: Path, run_dir: RunDir, overrides: Sequence[str]) -> list[str]:
    """One rank's program."""
    return [
        sys.executable,
        "-m",
        "pretrain",
        "train",
        str(experiment),
        "--run-dir",
        str(run_dir.path),
        *overrides,
    ]


class LocalRanks(RankGroup):
    """A group of ranks that can say why it failed."""

    def describe_failure(self, statuses: Sequence[int]) -> str:
        return describe_failure(statuses, self.logs, first_failure=self.first_failure)


def starter(command: Sequence[str], num_ranks: int, run_dir: RunDir) -> Callable[[int], LocalRanks]:
    """Starts attempts of `command`; rank 0's lines appear here too."""

    def start(number: int) -> LocalRanks:
        ranks = LocalRanks(command, num_ranks, run_dir.logs, number, echo_rank_zero=True)
        _say(f"attempt {number}: {num_ranks} ranks, processes {' '.join(map(str, ranks.pids))}")
        return ranks

    return start


def _remove_refused(run_dir: RunDir) -> None:
    """A run that was refused before it began leaves nothing: only our lock and the logs are there."""
    for path in (*run_dir.logs.glob("attempt-*-rank-*.log"), *run_dir.path.glob("*.lock")):
        path.unlink()
    for directory in (run_dir.logs, run_dir.path):
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def _say(line: str) -> None:
    print(line, flush=True)
