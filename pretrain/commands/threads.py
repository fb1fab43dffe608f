"""`--threads` of the commands that compute with trained models."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from foundation.errors import ConfigError
from foundation.settings import MOST_THREADS
from pretrain.config.run import RunConfig
from pretrain.distributed.threads import set_threads


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    threads = "CPU threads (default: the run's engine.threads, else $OMP_NUM_THREADS, else cores)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)


def check_threads(arguments: argparse.Namespace) -> None:
    """ConfigError for a number that is none of threads."""
    if arguments.threads is not None and not 1 <= arguments.threads <= MOST_THREADS:
        raise ConfigError(f"--threads={arguments.threads} must be from 1 to {MOST_THREADS:,}")


def use_threads(arguments: argparse.Namespace, configs: Sequence[RunConfig]) -> None:
    """Compute with the threads of the flag or of the runs, whose cores may have been more."""
    of_runs = max(config.engine.threads for config in configs)
    set_threads(arguments.threads or min(of_runs, os.cpu_count() or 1))
