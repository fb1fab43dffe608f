"""Questions to a run's journal, ledger.jsonl: pure functions of its events, oldest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pretrain.rundir.goodput import BEGINNINGS, Event, is_beginning, time_of

_ENDS = ("stop", "finish", "attempt_ended")
_FAILURES = ("retry", "give up", "refused")
_REFUSED_JOB = "refused: "  # begins why a job ended that came second
_ENDS_OF_JOBS_ALREADY_TOLD = ("finished", "gave up or refused", "cancelled")


def without_refused_jobs(ledger: Sequence[Event]) -> list[Event]:
    """The events but for those of jobs that found the run in another one's hands: nothing of it was theirs."""
    refused = {
        event["job"]
        for event in ledger
        if event.get("event") == "job_ended" and str(event.get("why", "")).startswith(_REFUSED_JOB)
    }
    return [event for event in ledger if event.get("job") not in refused]


def last_of(ledger: Sequence[Event], *kinds: str) -> Event | None:
    """The last event of one of these kinds."""
    return _last(ledger, lambda event: event.get("event") in kinds)


def last_turn(ledger: Sequence[Event]) -> Event | None:
    """The last event at which an attempt, or a job that makes attempts, began or ended.

    Where Slurm ends a job, its supervisor says so at once and the ranks' last words follow; they are no turn any more.
    """
    ended = last_of(ledger, "job_ended")
    start = f"{ended['job']}.{ended.get('restart', 0)}" if ended is not None else ""
    timely = [event for event in ledger if not begins_in(event, start)]
    turn = last_of(timely, *BEGINNINGS, *_ENDS, "job_started", "job_ended")
    of_job = last_of(timely, *BEGINNINGS, "submitted", "job_started", "job_ended")
    return of_job if of_job is not None and of_job["event"] == "job_ended" else turn


def last_end(ledger: Sequence[Event]) -> Event | None:
    """How the last attempt that ended did."""
    return last_of(ledger, *_ENDS)


def last_job(ledger: Sequence[Event]) -> str | None:
    """The id of the last Slurm job that was submitted for the run or has worked on it."""
    event = last_of(ledger, "submitted", "job_started")
    return None if event is None else str(event["job"])


def last_failure(ledger: Sequence[Event]) -> tuple[str, float] | None:
    """(in words, when) of what interrupted the run last against its will."""
    event = _last(ledger, is_interruption)
    if event is None:
        return None
    # where training itself gave up, the supervisor knows no more than that
    verdict = last_of(ledger, "gave_up")
    begun = last_of(ledger, *BEGINNINGS)
    if (
        verdict is not None
        and begun is not None
        and time_of(begun) < time_of(verdict) <= time_of(event)
    ):
        event = verdict
    return str(event.get("reason") or event.get("why")), time_of(event)


def is_interruption(event: Event) -> bool:
    """Whether it says that an attempt or a job ended against the run's will, whoever makes it go on."""
    if event.get("event") == "job_ended":
        return event["why"] not in _ENDS_OF_JOBS_ALREADY_TOLD
    return event.get("next") in _FAILURES


def begins_in(event: Event, start: str) -> bool:
    """Whether ranks of this job (17), or of this start of a job (17.2), began; they say so late where it is ending."""
    return is_beginning(event) and str(event.get("attempt", "")).startswith(f"{start}.")


def num_attempts(ledger: Sequence[Event], is_running: bool) -> int:
    """How many times ranks were started; an attempt that ended before its first step counts too."""
    count, is_open = 0, False
    for event in ledger:
        if is_beginning(event):
            count, is_open = count + 1, True
        elif event.get("event") == "attempt_ended":
            count, is_open = count + (not is_open), False
    return count + (is_running and not is_open)


def _last(ledger: Sequence[Event], fits: Callable[[Event], bool]) -> Event | None:
    return next((event for event in reversed(ledger) if fits(event)), None)
