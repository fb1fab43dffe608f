"""`pretrain branch RUN@STEP NEW`: a new run that begins with a checkpoint of another one."""

import argparse
from dataclasses import replace
from pathlib import Path

from foundation.cli import add_overrides
from foundation.errors import ConfigError
from foundation.settings import COMMAND_LINE, parse_config
from foundation.typed_values import to_tree
from foundation.yaml_files import merge, parse_overrides
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import RunConfig
from pretrain.rundir.branch import begin_branch
from pretrain.rundir.changed_settings import describe_rate
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import RUNS
from pretrain.rundir.run_step import run_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `pretrain branch`."""
    parser.add_argument("trunk", metavar="RUN@STEP", help="checkpoint: of a step, best or last")
    parser.add_argument("new", type=Path, metavar="NEW", help="name of the new run, or a directory")
    add_overrides(
        parser, "settings that change from this step on, such as optim.learning_rate=1e-4"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the run directory; nothing is trained."""
    trunk, step = run_step(arguments.trunk)
    if step is None:
        raise ConfigError(f"{trunk}: expected a step of the run, such as {trunk}@last")
    source, new = RunDir.open(trunk), arguments.new
    tree = to_tree(replace(source.settings_at(step), name=new.name))
    merge(tree, parse_overrides(arguments.overrides))
    config = parse_config(RunConfig, tree, f"{COMMAND_LINE} (over {arguments.trunk})")
    directory = new if len(new.parts) > 1 else RUNS / new
    begin_branch(with_absolute_paths(config), directory, trunk, step)
    steps = f"{step:,} of {config.optim.steps:,} steps"
    print(f"{directory} begins with the checkpoint of {trunk} after {steps}")
    if rate := describe_rate(source.settings_at(max(0, step - 1)), config, step):
        print(rate)
    elsewhere = "" if directory == RUNS / config.name else f" --run-dir {directory}"
    more = " optim.steps=MORE" if step == config.optim.steps else ""
    print(f"Train: launcher local {directory / 'config.yaml'}{elsewhere}{more}")
    return 0
