"""Requeues a job with spare nodes whose first node is lost.

Such a job outlives its nodes (`--no-kill`), also the one with its batch script and supervisor:
Slurm 22.05 then lets it hold the others until its time limit, with nothing running. So a small
process on another node of the job asks Slurm, and requeues the job.
"""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from data_pipeline.errors import exit_status_of
from data_pipeline.own_programs import own_command
from launcher.slurm import client as slurm
from launcher.slurm.job_exit import ThisJob
from launcher.slurm.srun import kill_silently, task_command
from pretrain.processes.local_ranks import set_parent_death_signal

_POLL_SECONDS = 10.0
_RESTART_SECONDS = 60.0
_log = logging.getLogger(__name__)


class FirstNodeGuard:
    """That process, on the last node; where it ends with its node, on the one before.

    A context manager; call `watch` often. It ends with the job's start or with the supervisor.
    """

    def __init__(self, job: ThisJob, is_needed: bool) -> None:
        self._job, self._is_needed = job, is_needed
        self._nodes = itertools.cycle(reversed(job.nodes[1:]))
        self._srun: subprocess.Popen[bytes] | None = None
        self._started = -_RESTART_SECONDS

    def __enter__(self) -> FirstNodeGuard:
        self.watch()
        return self

    def __exit__(self, *_: object) -> None:
        # Silently: if this node was cut off, the job has restarted elsewhere, with a step of the
        # same number.
        if self._srun is not None and self._srun.poll() is None:
            kill_silently(self._srun.pid)
            self._srun.wait()

    def watch(self) -> None:
        """Start the process if it does not run, which may be because its node was lost."""
        is_running = self._srun is not None and self._srun.poll() is None
        is_early = time.monotonic() - self._started < _RESTART_SECONDS
        if is_running or is_early or not self._is_needed:
            return
        node = next(self._nodes)
        if self._srun is not None:
            _log.warning("the watch over the first node ended; starting it on node %s", node)
        self._started = time.monotonic()
        guard = own_command("launcher.slurm.first_node_guard", self._job.id, str(self._job.restart))
        parent = os.getpid()
        self._srun = subprocess.Popen(
            task_command(node, *guard, flags=["--cpus-per-task=1"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: set_parent_death_signal(parent),
        )


def has_lost_first_node(fields: Mapping[str, str], nodes: Sequence[str]) -> bool:
    """Whether Slurm has taken the node of the batch script from a job that still runs."""
    first = fields.get("BatchHost")
    return fields.get("JobState") == "RUNNING" and first is not None and first not in nodes


def main() -> int:
    """`launcher.slurm.first_node_guard JOB RESTART`, as a step of the job."""
    job, restart = sys.argv[1:]
    while True:
        time.sleep(_POLL_SECONDS)
        try:
            fields = slurm.details(job)
            if fields.get("Restarts") != restart or not fields.get("NodeList"):
                return 0
            if has_lost_first_node(fields, slurm.node_names(fields["NodeList"])):
                slurm.requeue(job)
                return 0
        except slurm.SlurmUnreachable:
            continue


if __name__ == "__main__":
    sys.exit(exit_status_of(main))
