"""Keeps the steps of a requeued job apart from those of its earlier starts.

A requeued job counts its steps from 0 again. If a node was lost, Slurm may still have a signal for
it that ends an old step; it delivers it up to a minute after the node is back, and then ends the
new step of the same number. No option of srun chooses a number, so empty steps use up the old ones.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from launcher.slurm.job_exit import ThisJob
from launcher.slurm.srun import task_command
from pretrain.rundir.launch_events import (
    AttemptEnded,
    JobEnded,
    JobEndReason,
    JobStarted,
    NodeReplaced,
)
from pretrain.rundir.ledger import events_of
from pretrain.rundir.training_events import Event

# The ranks' own step, one that looks for nodes that miss the run directory or cannot start the
# ranks, one that stages the code on the nodes, a new guard of the first node; and trials of nodes
# that may not respond, seldom more than two.
_STEPS_PER_ATTEMPT = 6
_MOST = 40
_SECONDS = 60.0  # that all of them may take
_POLL_SECONDS = 0.1
_NODE_LOST = (JobEndReason.FIRST_NODE_LOST, JobEndReason.NODE_FAILED)
_log = logging.getLogger(__name__)


def use_up_old_numbers(
    ledger: Sequence[Event], job: ThisJob, meanwhile: Callable[[], None]
) -> None:
    """Call before the first step of a start of the job; `meanwhile` is called many times a second.

    What it raises ends the empty steps.
    """
    count = num_old_steps(ledger, job)
    if not count:
        return
    _log.info("a node was lost: %d empty steps, so that no old step's number is used again", count)
    srun, no = task_command(job.nodes[0], "true", flags=["--quiet"]), subprocess.DEVNULL
    steps = [subprocess.Popen(srun, stdin=no, stdout=no, stderr=no) for _ in range(count)]
    deadline = time.monotonic() + _SECONDS
    try:
        while any(step.poll() is None for step in steps) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(_POLL_SECONDS)
    finally:
        for step in steps:  # one that fails has used a number, too
            step.kill()
            step.wait()


def num_old_steps(ledger: Sequence[Event], job: ThisJob) -> int:
    """How many steps earlier starts of the job have had at most; 0 if none lost a node."""
    of_job = [event for event in ledger if getattr(event, "job", None) == job.id]
    before = list(takewhile(lambda event: getattr(event, "restart", -1) != job.restart, of_job))
    if not any(map(_loses_a_node, before)):
        return 0
    # Each start has used up as many numbers as an attempt has, or more, before its first attempt;
    # its last one may have ended with the supervisor, unrecorded.
    attempts = 2 * len(events_of(before, JobStarted)) + len(events_of(before, AttemptEnded))
    return min(_MOST, attempts * _STEPS_PER_ATTEMPT)


def _loses_a_node(event: Event) -> bool:
    is_end = isinstance(event, JobEnded) and event.reason in _NODE_LOST
    return is_end or isinstance(event, NodeReplaced)
