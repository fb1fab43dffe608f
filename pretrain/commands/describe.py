"""`pretrain describe`: parameters, FLOPs, memory, disk and time before a run starts. Torch-free."""

import argparse
import sys
from dataclasses import replace

from foundation.cli import Answer, add_experiment, add_json, check_least
from foundation.errors import EmptyLaneError
from foundation.settings import load_config
from foundation.sizes import size_of
from pretrain.commands.hardware import add_hardware_arguments, hardware_of
from pretrain.config.resolve import resolve_if_built, with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.description import describe
from pretrain.rundir.ownership import refuse_foreign_urls
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain describe`."""
    add_experiment(parser, "experiment or model file (YAML), or a run")
    add_hardware_arguments(parser)
    add = parser.add_argument
    add("--mfu", type=float, help="assumed utilization of the peak (default 0.35, on a CPU 0.25)")
    add("--tokens", type=size_of("tokens"), metavar="N", help="train on N tokens, not optim.steps")
    add_json(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Describe the run."""
    path = run_path(arguments.experiment)
    if is_run := path.is_dir():
        path = RunDir.open(path).config_file
    config = load_config(RunConfig, path, arguments.overrides)
    if is_run and not any(override.startswith("data.") for override in arguments.overrides):
        refuse_foreign_urls(path, config)
    if arguments.tokens is not None:
        check_least(arguments, 1, "tokens")
        steps = max(1, round(arguments.tokens / config.tokens_per_step))
        config = replace(config, optim=replace(config.optim, steps=steps))
    hardware = hardware_of(arguments)
    try:
        config = resolve_if_built(config)
    except EmptyLaneError as error:  # a plan may come before the text
        print(f"note: training needs a larger corpus: {error}", file=sys.stderr)
        config = with_vocabulary(config)
    if config.initial_weights is not None and not is_run:
        # A run that exists has its own weights. Late: to compare shapes it imports torch.
        from pretrain.weights.initial_weights import check_initial_weights

        check_initial_weights(config)
    return describe(config, hardware, arguments.mfu)
