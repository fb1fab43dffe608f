"""`pretrain train`: the program of one rank."""

import argparse
import os
import tempfile
from pathlib import Path

from data_pipeline.corpora.fetch import NotFetchedError
from foundation.cli import add_experiment
from foundation.errors import NodeError, exit_status_of, is_of_site, own_status
from foundation.settings import load_config
from pretrain.checkpoint.facts import add_from_step
from pretrain.config.resolve import resolve, with_absolute_paths
from pretrain.config.run import RunConfig
from pretrain.distributed.slurm_variables import rank_numbers
from pretrain.errors import StorageError
from pretrain.processes.leaving import leave_group
from pretrain.rundir.exit_statuses import EXIT_SITE_FAILED
from pretrain.rundir.heartbeat import Heartbeat
from pretrain.rundir.ownership import refuse_foreign_run, refuse_links
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.watchdog import start_limit
from pretrain.terminal.log import add_log_level_argument, set_up_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain train`."""
    add_experiment(parser)
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, help="new run directory, or this run's to resume")
    add_from_step(parser)
    add_log_level_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train or resume the run as one rank; the status tells the launcher what failed."""
    return exit_status_of(lambda: _train(arguments), status_of=_status_of)


def _status_of(error: Exception) -> int:
    is_away = isinstance(error, NotFetchedError) and not error.is_final
    is_site = is_away or isinstance(error, StorageError) or is_of_site(error)
    return EXIT_SITE_FAILED if is_site else own_status(error)


def _train(arguments: argparse.Namespace) -> int:
    refuse_foreign_run(arguments.run_dir)
    config = resolve(
        with_absolute_paths(load_config(RunConfig, arguments.experiment, arguments.overrides))
    )
    rank, world_size, local_rank = rank_numbers(os.environ)
    seconds, run_dir = config.engine.watchdog_timeout_seconds, RunDir(arguments.run_dir)
    refuse_links(run_dir.path)
    run_dir.refuse_other_files()  # before heartbeats are there
    limit = start_limit(os.environ) if seconds else 0.0
    # torchrun restarts ranks with the same arguments, when --from-step has been done already.
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    from_step = None if is_restart else arguments.from_step

    def train() -> int:
        """Meet the other ranks, then train."""
        from pretrain.distributed.rank_device import use_device
        from pretrain.distributed.world import init_world, world_from_environment
        from pretrain.engines.engine import is_out_of_memory
        from pretrain.processes.device import set_device_variables
        from pretrain.run import run_training, set_threads_of_rank

        set_threads_of_rank()
        set_device_variables(os.environ, Path(tempfile.gettempdir()))
        use_device(world_from_environment(os.environ).device)  # a broken driver hangs here
        heartbeat.beat(0, "start")
        try:
            world = init_world(seconds)
        except RuntimeError as error:
            if is_out_of_memory(error):  # another process has it: the run has allocated nothing yet
                raise NodeError(f"found no device memory before training: {error}") from error
            raise
        heartbeat.allow(seconds)
        return run_training(config, run_dir.path, world, from_step, heartbeat)

    set_up_logging(f"rank {rank}", arguments.log_level)
    with Heartbeat(
        run_dir.heartbeats, rank, limit, local_rank=local_rank, phase="launch"
    ) as heartbeat:
        return leave_group(train, world_size, _status_of)
