"""How long a run was under way: pure functions of its ledger's events, oldest first. Torch-free.

Goodput is the share of that time which went into steps that count. Start-up, saves, evaluations, waiting after a
failure and steps done again count against it; time in which the run was finished, stopped on request or queued is
left out.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
BEGINNINGS = ("start", "resume")


def time_of(event: Event) -> float:
    """When it was written, in seconds since 1970."""
    return datetime.datetime.fromisoformat(event["time"]).timestamp()


def is_beginning(event: Event) -> bool:
    return event.get("event") in BEGINNINGS


def is_finished(event: Event) -> bool:
    """Whether it says that all steps were made."""
    return event.get("event") == "finish" or event.get("next") == "finished"


def is_request(event: Event) -> bool:
    """Whether it says that an attempt stopped because it was asked to."""
    return event.get("event") == "stop" or event.get("next") == "stopped"


def elapsed_seconds(ledger: Sequence[Event], end: float) -> float:
    """Time from the first start to `end`, without that in which the run was finished, stopped or in Slurm's queue."""
    spent, since, has_begun = 0.0, None, False
    for event in ledger:
        has_begun = has_begun or is_beginning(event)
        if since is None and (
            is_beginning(event) or (has_begun and event.get("event") == "job_started")
        ):
            since = time_of(event)
        elif since is not None and (
            is_finished(event) or is_request(event) or event.get("event") == "job_ended"
        ):
            spent, since = spent + time_of(event) - since, None
    return spent if since is None else spent + end - since


def goodput(useful_seconds: float, spent_seconds: float) -> float | None:
    """The share, at most 1; None before there is any."""
    return (
        min(1.0, useful_seconds / spent_seconds) if spent_seconds > 0 and useful_seconds else None
    )
