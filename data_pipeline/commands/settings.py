"""`data-pipeline settings`: what every setting of a corpus means.

The other programs show theirs with `show`.
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from data_pipeline.config import CorpusConfig
from foundation.cli import ResumeRule, as_text, no_resume

WIDEST = 100  # columns, so that lines stay readable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of every `settings` command."""
    parser.add_argument(
        "prefix",
        nargs="?",
        default="",
        metavar="PREFIX",
        help="a setting, a section or a part of a name (default: all settings)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the settings of a corpus file."""
    return show(CorpusConfig, arguments.prefix)


def show(schema: Any, prefix: str, rule: ResumeRule = no_resume) -> int:
    """Print the settings that begin with `prefix`, in lines as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    for line in as_text(schema, prefix, rule, width):
        print(line)
    return 0
