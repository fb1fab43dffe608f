"""What the commands' flags have in common."""

from __future__ import annotations

import argparse

from data_pipeline.errors import ConfigError


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """ConfigError for the first of these flags that is below one."""
    for name in names:
        if getattr(options, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')}={getattr(options, name)} must be positive"
            )
