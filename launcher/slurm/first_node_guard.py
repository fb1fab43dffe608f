"""Requeues a job with spare nodes whose first node is lost.

Such a job outlives its nodes (`--no-kill`), also the one with its batch script and supervisor:
Slurm 22.05 then lets it hold the others until its time limit, with nothing running. So a small
process on another node of the job asks Slurm, and requeues the job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from data_pipeline.errors import UserError, exit_status_of
from data_pipeline.own_programs import own_command
from launcher.slurm import client as slurm
from launcher.slurm.srun import kill_silently, task_command
from pretrain.processes.local_ranks import set_parent_death_signal

_POLL_SECONDS = 10.0
_RESTART_SECONDS = 60.0
_log = logging.getLogger(__name__)


class FirstNodeGuard:
    """That process, on the last node that is there; call `watch` often.

    A context manager. It ends with the job's start or with the supervisor.
    """

    def __init__(self, job: str, restart: int, is_needed: bool) -> None:
        self._job, self._restart, self._is_needed = job, restart, is_needed
        self._srun: subprocess.Popen[bytes] | None = None
        self._asked = -_RESTART_SECONDS
        self._others: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()

    def __enter__(self) -> FirstNodeGuard:
        if self._is_needed:  # and at once: the first attempt may take minutes to start
            self._asked = time.monotonic()
            self._ask()
            self.watch()
        return self

    def __exit__(self, *_: object) -> None:
        # Silently: if this node was cut off, the job has restarted elsewhere, with a step of the
        # same number.
        if self._srun is not None and self._srun.poll() is None:
            kill_silently(self._srun.pid)
            self._srun.wait()

    def watch(self) -> None:
        """Start the process if it does not run, which may be because its node was lost.

        Returns at once: a controller that does not respond is asked in a thread.
        """
        if not self._is_needed or (self._srun is not None and self._srun.poll() is None):
            return
        with contextlib.suppress(queue.Empty):
            # Started here and not in that thread, with which its children would die.
            if nodes := self._others.get_nowait():
                if self._srun is not None:
                    what = "its node was lost, or srun"
                    _log.warning("starting the watch over the first node again: %s", what)
                self._srun = self._start(nodes[-1])
            return
        if time.monotonic() - self._asked >= _RESTART_SECONDS:
            self._asked = time.monotonic()
            threading.Thread(target=self._ask, name="first node guard", daemon=True).start()

    def _ask(self) -> None:
        with contextlib.suppress(UserError):  # without an answer: later
            self._others.put(others_of(slurm.details(self._job)))

    def _start(self, node: str) -> subprocess.Popen[bytes]:
        guard = own_command("launcher.slurm.first_node_guard", self._job, str(self._restart))
        parent = os.getpid()
        return subprocess.Popen(
            task_command(node, *guard, flags=["--cpus-per-task=1"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: set_parent_death_signal(parent),
        )


def others_of(fields: Mapping[str, str]) -> Sequence[str]:
    """The job's nodes except for its first one, where its batch script runs."""
    nodes = slurm.node_names(fields["NodeList"]) if fields.get("NodeList") else []
    return [node for node in nodes if node != fields.get("BatchHost")]


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
