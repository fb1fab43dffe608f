"""How the process of a rank ends: with the others, or alone and at once.

NCCL's group waits at its end for the other ranks of the node. They may be inside a collective that
waits for this rank, so only ranks that have all finished or saved close the group. After any other
end of a rank the launcher ends the others within seconds.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from foundation.errors import exit_status_of, own_status
from pretrain.rundir.exit_statuses import EXIT_STOPPED

logger = logging.getLogger(__name__)


def leave_group(
    work: Callable[[], int],
    world_size: int,
    status_of: Callable[[Exception], int] = own_status,
    report: Callable[[str], None] = logger.error,
) -> int:
    """Do a rank's work, and close its group if all ranks do; returns the exit status.

    An error on one of several ranks is written, and ends the process here.
    """
    from pretrain.distributed.world import destroy_process_group  # late: it takes torch

    status = 1
    try:
        status = exit_status_of(work, report=report, status_of=status_of)
    finally:
        if world_size == 1 or status in (0, EXIT_STOPPED):
            destroy_process_group()
        else:
            end_at_once(status)
    return status


def end_at_once(status: int) -> NoReturn:
    """End the process, with the traceback of the error that is being handled."""
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Exit without Python's shutdown, where gloo's threads sometimes abort a finished process."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
    os._exit(status)
