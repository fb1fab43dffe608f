"""`--watch`: what a command shows, drawn again every few seconds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from foundation.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

_SECONDS = 5.0


def add_watch_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--watch`."""
    parser.add_argument(
        "--watch", action="store_true", help=f"update every {_SECONDS:g} s, until Ctrl-C"
    )


def watch(draw: Callable[[], RenderableType]) -> int:
    """Show what `draw` returns, again and again, until Ctrl-C; 0."""
    if not sys.stdout.isatty():
        raise ConfigError("--watch needs a terminal; leave it out")
    from rich.live import Live

    from launcher.commands.tables import console

    try:
        with Live(draw(), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(_SECONDS)
                live.update(draw(), refresh=True)
    except KeyboardInterrupt:
        return 0
