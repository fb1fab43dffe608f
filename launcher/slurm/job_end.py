"""Why a Slurm job ends, and whether it is ours to put it back into the queue."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_NOTICE = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO (.+?) \*\*\*")
_WORDS = {
    "NODE FAILURE": "a host failed",
    "PREEMPTION": "preempted",
    "JOB REQUEUE": "requeued by hand",
    "TIME LIMIT": "time limit",
}
_FAILED_HOST = re.compile(r"Node failure on (\S+)")


@dataclass(frozen=True)
class JobEnd:
    why: str
    requeue: bool  # nobody else does
    at_once: bool = False  # Slurm is ending the job already: there is no time to wait for the ranks


def end_of(job: Mapping[str, str], restart: int, log: str, warned: bool = False) -> JobEnd:
    """What `job`, the fields of `scontrol show job`, means to its start number `restart` that was asked to stop.

    `log` is what Slurm wrote into the job's log; `warned`: its notice ahead of the time limit came.
    """
    if (
        int(job.get("Restarts", "0")) > restart
    ):  # Slurm has requeued it; the fields are those of the next start
        return JobEnd(_notice_in_words(log), requeue=False)
    if job.get("Reason") == "TimeLimit":
        return JobEnd("time limit", requeue=True, at_once=True)
    if job.get("JobState") not in ("RUNNING", "PREEMPTED", "SUSPENDED"):
        return JobEnd("cancelled", requeue=False, at_once=True)
    if job.get("PreemptTime", "None") not in ("None", ""):
        return JobEnd("preempted", requeue=True)
    return JobEnd("time limit near" if warned else "asked to stop", requeue=True)


def _notice_in_words(log: str) -> str:
    notices = _NOTICE.findall(log)
    found = notices[-1] if notices else ""
    words = next(
        (words for start, words in _WORDS.items() if found.startswith(start)), "ended by Slurm"
    )
    host = _FAILED_HOST.findall(log)
    return f"host {host[-1]} failed" if words == _WORDS["NODE FAILURE"] and host else words
