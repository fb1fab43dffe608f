"""Logging: every line has its level, time and writer: `INFO 12:04:31 rank 3: ...`. Torch-free.

Modules log through `logging.getLogger(__name__)`. A process calls `set_up_logging` once, where it
knows who it is. `print` is for the output that a user asked a command for.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
LEVEL_VARIABLE = "PRETRAIN_LOG_LEVEL"  # the level that started processes inherit
PACKAGES = ("data_pipeline", "pretrain", "launcher")
# What each line starts with, for those who read log files.
LINE_START = re.compile(
    r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d:\d\d:\d\d (?P<who>[^:]+): "
)


def add_log_level_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--log-level`."""
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        help=f"least severe level to log (default: ${LEVEL_VARIABLE}, else info)",
    )


def set_up_logging(who: str, level: str | None = None) -> None:
    """Log to stderr, as `who`, what our packages report at `level` or above; others' warnings too.

    Started processes inherit the level. Without one, `$PRETRAIN_LOG_LEVEL` counts, else info.
    """
    if level:
        os.environ[LEVEL_VARIABLE] = level
    name = os.environ.get(LEVEL_VARIABLE, "info").lower()
    threshold = getattr(logging, name.upper() if name in LEVELS else "INFO")
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _StderrHandler)]:
        root.removeHandler(handler)
    handler = _StderrHandler(threshold)
    start = f"%(levelname)s %(asctime)s {who.replace('%', '%%')}: "
    handler.setFormatter(logging.Formatter(f"{start}%(message)s", datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(max(threshold, logging.WARNING))  # libraries report much at level info
    for package in PACKAGES:
        logging.getLogger(package).setLevel(threshold)
    warnings.showwarning = _log_warning


def adopt_logger(name: str, ignored: str | None = None) -> None:
    """Let a library's logger, which writes on its own, report warnings and errors through ours.

    Messages that contain `ignored` are dropped. Call it after the library was imported: that is
    when it adds its handlers.
    """
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    logger.filters = [lambda record: ignored not in record.getMessage()] if ignored else []


class _StderrHandler(logging.Handler):
    """Writes each record with one call, so that lines of several threads or ranks do not mix.

    `sys.stderr` is looked up each time: `live_bar` replaces it for a while.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # a full disk or a closed terminal must not stop training
            self.handleError(record)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.getLogger("py.warnings").warning(
        "%s:%d: %s: %s", filename, lineno, category.__name__, message
    )
