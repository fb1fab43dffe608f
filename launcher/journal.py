"""Questions to a run's journal, ledger.jsonl: pure functions of its events, oldest first."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
BEGINNINGS = ("start", "resume")
_ENDS = ("stop", "finish", "attempt_ended")
_FAILURES = ("retry", "give up", "refused")


def time_of(event: Event) -> float:
    """When it was written, in seconds since 1970."""
    return datetime.datetime.fromisoformat(event["time"]).timestamp()


def last_of(ledger: Sequence[Event], *kinds: str) -> Event | None:
    """The last event of one of these kinds."""
    return _last(ledger, lambda event: event.get("event") in kinds)


def last_turn(ledger: Sequence[Event]) -> Event | None:
    """The last event at which an attempt began or ended."""
    return last_of(ledger, *BEGINNINGS, *_ENDS)


def last_failure(ledger: Sequence[Event]) -> Event | None:
    """How the last attempt that failed ended."""
    return _last(ledger, lambda event: event.get("next") in _FAILURES)


def is_beginning(event: Event) -> bool:
    return event.get("event") in BEGINNINGS


def is_finished(event: Event) -> bool:
    """Whether it says that all steps were made."""
    return event.get("event") == "finish" or event.get("next") == "finished"


def is_request(event: Event) -> bool:
    """Whether it says that an attempt stopped because it was asked to."""
    return event.get("event") == "stop" or event.get("next") == "stopped"


def num_attempts(ledger: Sequence[Event], is_running: bool) -> int:
    """How many times ranks were started; an attempt that ended before its first step counts too."""
    count, is_open = 0, False
    for event in ledger:
        if is_beginning(event):
            count, is_open = count + 1, True
        elif event.get("event") == "attempt_ended":
            count, is_open = count + (not is_open), False
    return count + (is_running and not is_open)


def seconds_spent(ledger: Sequence[Event], end: float) -> float:
    """Time from the first start to `end`, without that in which the run was stopped on request or finished."""
    spent, since = 0.0, None
    for event in ledger:
        if is_beginning(event) and since is None:
            since = time_of(event)
        elif since is not None and (is_finished(event) or is_request(event)):
            spent, since = spent + time_of(event) - since, None
    return spent if since is None else spent + end - since


def _last(ledger: Sequence[Event], fits: Callable[[Event], bool]) -> Event | None:
    return next((event for event in reversed(ledger) if fits(event)), None)
