"""`pretrain train`: one rank's program."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.config_loader import load_config
from pretrain.config.phases import advice_on_phases
from pretrain.config.resolve import resolve
from pretrain.config.run import RunConfig
from pretrain.terminal.live_bar import live_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain train`, one rank's program."""
    parser.add_argument("config", type=Path, help="experiment file (YAML)")
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        required=True,
        help="where checkpoints and metrics go; resumed if it holds this run",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train or resume the run of this directory as one rank of WORLD_SIZE."""
    config = resolve(load_config(RunConfig, arguments.config, arguments.overrides))
    from pretrain.distributed.world import destroy_process_group, init_world
    from pretrain.run import run_training, set_threads

    set_threads(config)

    world = init_world()
    if world.is_main and (advice := advice_on_phases(config)):
        print(advice, flush=True)
    try:
        with live_bar():
            return run_training(config, arguments.run_dir, world)
    finally:
        destroy_process_group()
