"""The surrounding Slurm job, and the end of it: why, noted in the run's journal, and back into the queue or not."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launcher.restart_policy import NextAction
from launcher.slurm import client as slurm
from launcher.slurm.job_end import JobEnd, end_of
from launcher.slurm.job_history import excluded_nodes
from launcher.supervisor import StopSignals
from pretrain.processes.local_ranks import EXIT_STOPPED
from pretrain.rundir.run_dir import RunDir

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ThisJob:
    """The Slurm job, or task of an array, that this process is the batch script of."""

    id: str  # 17, or 17_3
    number: int  # one of its own for a task, too
    restart: int
    hosts: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> ThisJob:
        return cls(
            id=slurm.own_job(),
            number=int(os.environ["SLURM_JOB_ID"]),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            hosts=tuple(slurm.host_names(os.environ["SLURM_JOB_NODELIST"])),
        )

    @property
    def tags(self) -> dict[str, Any]:
        """What marks its events in the journal."""
        return {"job": self.id, "restart": self.restart}


class JobExit:
    """Finds out why the job ends, notes it, and puts the job back into the queue where that is ours to do. Once.

    `may_write` raises StaleAttempt where the job has begun anew elsewhere: then this start has no say any more.
    """

    def __init__(
        self, job: ThisJob, run_dir: RunDir, stop: StopSignals, may_write: Callable[[], None]
    ) -> None:
        self._job = job
        self._run_dir = run_dir
        self._stop = stop
        self._may_write = may_write
        self._looked_at = 0
        self._is_said = False

    def look(self) -> None:
        """To be called often: some ends leave seconds until Slurm kills this process."""
        received = self._stop.received[self._looked_at :]
        self._looked_at += len(received)
        if signal.SIGTERM in received and not self._is_said:
            end = self._end()
            if end.at_once or not end.requeue:
                self._say(end)

    def finish(self, status: int) -> None:
        """After the last attempt, which ended with `status`."""
        if self._is_said:
            return
        if status == EXIT_STOPPED:
            self._say(self._end())
        else:
            self._say(JobEnd("finished" if status == 0 else "gave up or refused", requeue=False))

    def give_up(self, why: str) -> None:
        """The run can not go on in this job."""
        if not self._is_said:
            self._say(JobEnd(why, requeue=False), next=NextAction.GIVE_UP.value)

    def leave(self, host: str) -> None:
        """The job goes back into the queue, to begin on other hosts than this one."""
        self._say(JobEnd(f"ranks on host {host} failed twice in a row", requeue=True), left=host)

    def can_leave(self, host: str) -> bool:
        """Whether the job can run without this host: it was not asked for by name, and the partition has others."""
        fields = _retry_unreachable(lambda: slurm.details(self._job.id))
        if host in _hosts_in(fields.get("ReqNodeList")):
            return False
        left = {
            host,
            *excluded_nodes(self._run_dir.read_ledger(), self._job.id),
            *_hosts_in(fields.get("ExcNodeList")),
        }
        sizes = {each.name: each.num_nodes for each in _retry_unreachable(slurm.partitions)}
        return sizes.get(fields.get("Partition", ""), 0) - len(left) >= len(self._job.hosts)

    def _end(self) -> JobEnd:
        warned = signal.SIGUSR1 in self._stop.received
        fields = _retry_unreachable(lambda: slurm.details(self._job.id))
        log = "".join(
            _tail(path) for path in sorted(self._run_dir.logs.glob("attempt-*-srun.log"))[-1:]
        )
        return end_of(
            fields, self._job.restart, log + _tail(Path(fields.get("StdOut", "/dev/null"))), warned
        )

    def _say(self, end: JobEnd, **more: str) -> None:
        self._is_said = True
        self._may_write()
        event = {
            "event": "job_ended",
            **self._job.tags,
            "why": end.why,
            "requeued": end.requeue,
            **more,
        }
        self._run_dir.append_ledger(event)
        print(
            f"job {self._job.id} ends: {end.why}"
            + ("; back into the queue" if end.requeue else ""),
            flush=True,
        )
        if end.requeue:
            exclude = excluded_nodes(self._run_dir.read_ledger(), self._job.id)
            _retry_unreachable(lambda: slurm.requeue(self._job.id, exclude))


def _retry_unreachable(ask: Callable[[], T]) -> T:
    """What Slurm answers, however long its controller is away: Slurm ends this process when it is time."""
    return slurm.patiently(ask, patience=math.inf)


def _hosts_in(node_list: str | None) -> list[str]:
    return slurm.host_names(node_list) if node_list else []


def _tail(path: Path, size: int = 8192) -> str:
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")
