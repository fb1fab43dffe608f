"""`--threads` of the commands that compute with trained models."""

from __future__ import annotations

import argparse

from foundation.errors import ConfigError
from foundation.settings import MOST_THREADS


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Declare the flag."""
    threads = "CPU threads (default: $OMP_NUM_THREADS, else cores)"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)


def check_threads(arguments: argparse.Namespace) -> None:
    """ConfigError for a number that is none of threads."""
    if arguments.threads is not None and not 1 <= arguments.threads <= MOST_THREADS:
        raise ConfigError(f"--threads={arguments.threads} must be from 1 to {MOST_THREADS:,}")
