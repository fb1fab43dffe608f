"""What a run's journal says about the Slurm jobs that had it.

{"event": "submitted", "job", "job_name"}
{"event": "job_started", "job", "restart", "hosts", "step"}       one for each start of a job's supervisor
{"event": "job_ended", "job", "restart", "why", "requeued"}       missing if the supervisor's own host was lost;
                                                                  "requeued": by the supervisor. With "next": "give up"
                                                                  the job ended for good before any attempt could
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from launcher.restart_policy import Attempt, NextAction
from launcher.slurm.srun import Step
from pretrain.rundir.goodput import Event

_CHANCES = 2  # attempts on a host
LOST_HOST = "its first host was lost"


def past_attempts(ledger: Sequence[Event], job: str) -> list[Attempt]:
    """How the attempts of all former starts of this job ended, those included whose supervisor could not say it.

    Attempts that were asked to stop say nothing about the run and are left out.
    """
    attempts: list[Attempt] = []
    for event in ledger:
        if event.get("job") != job:
            continue
        if event["event"] == "attempt_ended" and event["next"] != NextAction.STOPPED.value:
            attempts.append(
                Attempt(
                    statuses=tuple(event["statuses"]),
                    step_before=event["step_before"],
                    step_after=event["step"],
                )
            )
        elif event["event"] == "job_ended" and event["why"] == LOST_HOST:
            lost = (-signal.SIGKILL.value,)
            attempts.append(
                Attempt(statuses=lost, step_before=event["step_before"], step_after=event["step"])
            )
    return attempts


def node_to_exclude(ledger: Sequence[Event], job: str, step: Step) -> str | None:
    """The host whose ranks failed first in both of the last two attempts of this start, without a newer checkpoint."""
    own = [event for event in ledger if event.get("job") == job]
    begun = max(index for index, event in enumerate(own) if event["event"] == "job_started")
    last = [event for event in own[begun:] if event["event"] == "attempt_ended"][-_CHANCES:]
    blamed = [
        step.host_of(event["first_failure"])
        for event in last
        if event["first_failure"] is not None and event["step"] == event["step_before"]
    ]
    return blamed[0] if len(blamed) == _CHANCES and len(set(blamed)) == 1 else None


def excluded_nodes(ledger: Sequence[Event], job: str) -> list[str]:
    """The hosts that this job was sent away from."""
    own = [event for event in ledger if event["event"] == "job_ended" and event["job"] == job]
    return [event["left"] for event in own if "left" in event]


def open_start(ledger: Sequence[Event], job: str) -> Event | None:
    """The last start of this job, if nothing was written about its end."""
    for event in reversed(ledger):
        if event.get("job") == job and event["event"] == "job_ended":
            return None
        if event.get("job") == job and event["event"] == "job_started":
            return event
    return None


def other_jobs(ledger: Sequence[Event], job: str) -> list[str]:
    """Other jobs that began to work on the run before this one and did not say that they ended, newest first."""
    open_jobs: dict[str, None] = {}
    for event in ledger:
        other = event.get("job")
        if event["event"] == "job_started" and other == job:
            break
        if event["event"] == "job_started":
            open_jobs[str(other)] = None
        elif event["event"] == "job_ended" and not event["requeued"]:
            open_jobs.pop(str(other), None)
    return list(reversed(open_jobs))
