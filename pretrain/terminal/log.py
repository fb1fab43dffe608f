"""Logging: every line has its level, time and writer: `INFO 12:04:31 rank 3: ...`. Torch-free.

Modules log through `logging.getLogger(__name__)`. A process calls `set_up_logging` once, where it
knows who it is. `print` is for the output that a user asked a command for.
"""

import argparse
import contextlib
import logging
import os
import re
import sys
import warnings

from foundation.credentials import redacted
from foundation.errors import printable

LEVELS = ("debug", "info", "warning", "error")
LEVEL_VARIABLE = "PRETRAIN_LOG_LEVEL"  # the level that started processes inherit
# The file descriptor of a launcher's stderr, to which a rank also writes what it logs.
RELAY_VARIABLE, NO_RELAY = "PRETRAIN_LOG_RELAY", -1
PACKAGES = ("foundation", "data_pipeline", "pretrain", "launcher")
# What each line starts with, for those who read log files.
LINE_START = re.compile(
    r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d:\d\d:\d\d (?P<who>[^:]+): "
)


def add_log_level_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--log-level`."""
    words = f"least severe level to log (default: ${LEVEL_VARIABLE}, else info)"
    parser.add_argument("--log-level", choices=LEVELS, help=words)


def set_up_logging(who: str, level: str | None = None) -> None:
    """Log to stderr, as `who`, what our packages report at `level` or above.

    Other packages' warnings and errors are logged too. Started processes inherit the level. The
    default is `$PRETRAIN_LOG_LEVEL`, else info.
    """
    if level:
        os.environ[LEVEL_VARIABLE] = level
    name = os.environ.get(LEVEL_VARIABLE, "info").lower()
    threshold = getattr(logging, name.upper() if name in LEVELS else "INFO")
    root = logging.getLogger()
    # Processes that this one starts must not see it: there the number may be another file.
    relay = int(os.environ.pop(RELAY_VARIABLE, NO_RELAY))
    for handler in [own for own in root.handlers if isinstance(own, _StderrHandler)]:
        relay = max(relay, handler.relay)
        root.removeHandler(handler)
    handler = _StderrHandler(threshold, relay)
    start = f"%(levelname)s %(asctime)s {who.replace('%', '%%')}: "
    handler.setFormatter(logging.Formatter(f"{start}%(message)s", datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(max(threshold, logging.WARNING))  # libraries report much at level info
    for package in PACKAGES:
        logging.getLogger(package).setLevel(threshold)
    warnings.showwarning = _log_warning


def adopt_logger(name: str, ignored: str | None = None) -> None:
    """Let a library that writes its own log report its warnings and errors through ours.

    Messages that contain `ignored` are dropped. Call it after the library has been imported, since
    the import adds its handlers.
    """
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    logger.filters = [lambda record: ignored not in record.getMessage()] if ignored else []


class _StderrHandler(logging.Handler):
    """Writes each record with one call, so that lines of several threads or ranks do not mix.

    It also writes them to the file descriptor `relay`. That gets nothing else, while stderr also
    gets tracebacks and prints.
    """

    def __init__(self, level: int, relay: int = NO_RELAY) -> None:
        super().__init__(level)
        self.relay = relay

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = safe(self.format(record)) + "\n"
            sys.stderr.write(line)
            sys.stderr.flush()
            if self.relay != NO_RELAY:
                with contextlib.suppress(OSError):  # the launcher's terminal may be closed
                    os.write(self.relay, line.encode())
        except Exception:  # a full disk or a closed terminal must not stop training
            self.handleError(record)


def safe(text: str) -> str:
    """Return the text for terminals and log files, without escape sequences and passwords."""
    return printable(redacted(text))


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object
) -> None:
    logging.getLogger("py.warnings").warning(
        "%s:%d: %s: %s", filename, lineno, category.__name__, message
    )
