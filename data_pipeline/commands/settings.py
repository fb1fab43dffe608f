"""`data-pipeline settings`: what every setting of a corpus means."""

import argparse

from data_pipeline.config import CorpusConfig
from foundation.cli import add_prefix, show_settings

add_arguments = add_prefix


def run(arguments: argparse.Namespace) -> int:
    """Print the settings of a corpus file."""
    return show_settings(CorpusConfig, arguments.prefix)
