"""The flags of `pretrain evaluate --probe`. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from data_pipeline.errors import ConfigError
from data_pipeline.program import check_least
from data_pipeline.setting_fields import MOST_ROWS
from data_pipeline.sizes import size_of
from pretrain.commands.output_paths import check_output_directory
from pretrain.evaluation.probes.probe_settings import ProbeName

TRIALS = 64


def add_probe_flags(parser: argparse.ArgumentParser, what: Callable[..., Any]) -> None:
    """Declare --probe, by `what` among the things to measure, and the flags that go with it."""
    names = get_args(ProbeName)
    probes = f"probe the memory, and write a page with pictures: {', '.join(names)}"
    what("--probe", nargs="+", choices=names, metavar="PROBE", help=probes)
    add = parser.add_argument_group("with --probe").add_argument
    trials = f"needles and copies at each distance (default {TRIALS})"
    add("--trials", type=int, metavar="N", help=trials)
    longest = "test recall up to N tokens (default: twice what a layer sees)"
    add("--longest-distance", type=size_of("tokens"), metavar="N", help=longest)
    add("--seed", type=int, metavar="N", help="draw other needles and copies (default 0)")
    output = "directory for probes.html and probes.json (default: the run's)"
    add("--output", type=Path, metavar="DIR", help=output)


def check_probe_flags(arguments: argparse.Namespace) -> None:
    """Set the defaults of --probe; ConfigError for bad numbers and flags without --probe."""
    numbers = {"trials": TRIALS, "longest_distance": 0, "seed": 0}
    for name in (*numbers, "output"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, numbers.get(name))
        elif not arguments.probe:
            raise ConfigError(f"--{name.replace('_', '-')} requires --probe")
    if not arguments.probe:
        return
    check_least(arguments, 1, "trials")
    check_least(arguments, 0, "seed")
    if arguments.longest_distance > MOST_ROWS:
        raise ConfigError(
            f"--longest-distance={arguments.longest_distance} must be at most {MOST_ROWS:,}"
        )
    if arguments.output:
        check_output_directory("--output", arguments.output)
    if len(arguments.memory_length or ()) > 1:
        raise ConfigError("--probe goes with one --memory-length; compare two calls")
