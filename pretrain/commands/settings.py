"""`pretrain settings`: what every setting of a run means, and whether a resume may change it."""

import argparse

from foundation.cli import add_prefix, show_settings
from foundation.errors import ConfigError
from pretrain.config.run import RunConfig, why_fixed

add_arguments = add_prefix

# Names of what is not in an experiment, because the same run may continue on other machines.
MACHINES = ("gpus", "nodes", "ranks", "world_size", "cluster", "partition", "slurm", "num_gpus")


def run(arguments: argparse.Namespace) -> int:
    """Print the settings of an experiment file."""
    if arguments.prefix in MACHINES:
        raise ConfigError(
            f"{arguments.prefix}: not part of an experiment; use --ranks of launcher local, "
            "--nodes of launcher submit, or a cluster file: see 'launcher settings'"
        )
    return show_settings(RunConfig, arguments.prefix, resume_rule)


def resume_rule(name: str) -> str:
    """Return what a resume may do with a setting of a run."""
    is_fixed = why_fixed(name.replace("[]", ""))
    return "fixed for a run" if is_fixed else "a resume may change it"
