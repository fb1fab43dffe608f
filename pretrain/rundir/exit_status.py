"""The exit statuses of a rank, and how to read them. Torch-free."""

from __future__ import annotations

import contextlib
import signal

from pretrain.rundir.watchdog import END_SIGNAL

# A rank that was asked to stop and saved a checkpoint exits with this (EX_TEMPFAIL of sysexits.h).
EXIT_STOPPED = 75
# A forward or backward pass ran out of memory: all ranks have to restart with a smaller
# micro-batch.
EXIT_OUT_OF_MEMORY = 76
# Of a rank whose program was never run: its node or its container failed before. Shells use it too.
NEVER_STARTED = 127


def ended_by_watchdog(status: int) -> bool:
    """Whether the rank's watchdog ended it; nothing else sends that signal."""
    return status == -END_SIGNAL


def describe_exit(status: int) -> str:
    """An exit status as people say it; -N stands for signal N, as in `subprocess`."""
    if status == NEVER_STARTED:
        return "never started"
    if status >= 0:
        return f"exited with status {status}"
    if ended_by_watchdog(status):
        return "was ended by its watchdog"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
