"""The exit statuses of ranks, and what they mean. Torch-free."""

import contextlib
import signal

from foundation.errors import EXIT_NODE_UNUSABLE, EXIT_USER_ERROR
from pretrain.rundir.watchdog import END_SIGNAL

# A rank that was asked to stop and saved a checkpoint exits with this (EX_TEMPFAIL of sysexits.h).
EXIT_STOPPED = 75
# A forward or backward pass ran out of memory: all ranks have to restart with a smaller
# micro-batch.
EXIT_OUT_OF_MEMORY = 76
# Storage failed, or the host had no memory left: nothing is wrong with the run (EX_IOERR).
EXIT_SITE_FAILED = 74
# A rank's program was never run: its node or its container failed before. Shells use 127, too.
NEVER_STARTED = 127
# The rank's last line says what has to change; the other ranks ended because of this one.
EXPLAINED = (EXIT_USER_ERROR, EXIT_NODE_UNUSABLE, EXIT_SITE_FAILED)


def ended_by_watchdog(status: int) -> bool:
    """Return whether the rank's watchdog ended it; nothing else sends that signal."""
    return status == -END_SIGNAL


def describe_exit(status: int) -> str:
    """Describe an exit status; -N stands for signal N, as in `subprocess`."""
    if status == NEVER_STARTED:
        return "never started"
    if status == EXIT_NODE_UNUSABLE:
        return "found its node unusable"
    if status >= 0:
        return f"exited with status {status}"
    if ended_by_watchdog(status):
        return "was ended by its watchdog"
    if -status == signal.SIGBUS:
        return (
            "was killed by SIGBUS: a file that it had mapped, such as a shard, was cut or cannot "
            "be read, or /dev/shm is full"
        )
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
