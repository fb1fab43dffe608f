"""`launcher settings`: what every setting of a cluster file means."""

from __future__ import annotations

import argparse

from data_pipeline.commands import settings
from pretrain.costs.cluster import ClusterConfig

add_arguments = settings.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Print the settings of a cluster file."""
    return settings.show(ClusterConfig, arguments.prefix)
