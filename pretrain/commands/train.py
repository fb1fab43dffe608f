"""`pretrain train`: the program of one rank."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path

from data_pipeline.corpora.fetch import NotFetchedError
from foundation.cli import add_experiment
from foundation.errors import EXIT_USER_ERROR, exit_status_of, is_of_site
from foundation.retry import StorageError
from foundation.settings import load_config
from pretrain.checkpoint.facts import add_from_step
from pretrain.config.resolve import resolve, with_absolute_paths
from pretrain.config.run import RunConfig
from pretrain.rundir.events import EXIT_SITE_FAILED
from pretrain.terminal.log import add_log_level_argument, set_up_logging

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain train`."""
    add_experiment(parser)
    parser.add_argument(
        "--run-dir",
        type=Path,
        required=True,
        help="output directory for checkpoints and metrics; resumed if it contains this run",
    )
    add_from_step(parser)
    add_log_level_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train or resume the run of the directory, as one rank of WORLD_SIZE.

    The status tells the launcher what failed: the site, which it waits for, or the run.
    """
    return exit_status_of(lambda: _train(arguments), status_of=_status_of)


def _status_of(error: Exception) -> int:
    is_away = isinstance(error, NotFetchedError) and not error.is_final
    is_site = is_away or isinstance(error, StorageError) or is_of_site(error)
    return EXIT_SITE_FAILED if is_site else EXIT_USER_ERROR


def _train(arguments: argparse.Namespace) -> int:
    config = resolve(
        with_absolute_paths(load_config(RunConfig, arguments.experiment, arguments.overrides))
    )
    from pretrain.distributed.world import (
        destroy_process_group,
        init_world,
        world_from_environment,
    )
    from pretrain.processes.device import set_device_variables
    from pretrain.run import run_training, set_threads_of_rank

    rank = world_from_environment(os.environ)
    # torchrun restarts ranks with the same arguments: what a user has said once is done by then.
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    from_step = None if is_restart else arguments.from_step
    set_up_logging(f"rank {rank.rank}", arguments.log_level)
    set_threads_of_rank()
    set_device_variables(os.environ, Path(tempfile.gettempdir()))
    world = init_world(config.engine.watchdog_timeout_seconds)
    try:
        return exit_status_of(
            lambda: run_training(config, arguments.run_dir, world, from_step),
            report=logger.error,
            status_of=_status_of,
        )
    finally:
        destroy_process_group()
