"""`pretrain settings`: what every setting of a run means, and whether a resume may change it."""

from __future__ import annotations

import argparse

from data_pipeline.commands import settings
from pretrain.config.resume_rules import may_change
from pretrain.config.run import RunConfig

add_arguments = settings.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Print the settings of an experiment file."""
    return settings.show(RunConfig, arguments.prefix, resume_rule)


def resume_rule(name: str) -> str:
    """Return what a resume may do with a setting of a run."""
    allowed = may_change(RunConfig, name.replace("[]", ""))
    return "a resume may change it" if allowed else "fixed for a run"
