"""`pretrain settings`: what every setting of a run means, and whether a resume may change it."""

import argparse

from foundation.cli import add_prefix, show_settings
from pretrain.config.run import RunConfig, why_fixed

add_arguments = add_prefix


def run(arguments: argparse.Namespace) -> int:
    """Print the settings of an experiment file."""
    return show_settings(RunConfig, arguments.prefix, resume_rule)


def resume_rule(name: str) -> str:
    """Return what a resume may do with a setting of a run."""
    is_fixed = why_fixed(name.replace("[]", ""))
    return "fixed for a run" if is_fixed else "a resume may change it"
