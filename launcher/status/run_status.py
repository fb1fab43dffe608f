"""In which state a run is, judged from what its directory shows: pure, without files or clocks."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.status.journal import (
    begins_in,
    is_interruption,
    last_end,
    last_failure,
    last_of,
    last_turn,
)
from launcher.status.liveness import Beat, Lock, Measured, is_alive
from pretrain.rundir import goodput as time_spent
from pretrain.rundir.goodput import (
    BEGINNINGS,
    Event,
    is_beginning,
    is_finished,
    is_request,
    time_of,
)
from pretrain.terminal.text import duration

# A rank elsewhere whose last sign of life is older than this may be gone; one here is asked for by its process id.
SILENT_SECONDS = 300.0
LOST = "ended without a word"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run's directory shows at one moment."""

    now: float
    ledger: Sequence[Event]
    measured: Measured
    beats: Sequence[Beat]
    locks: Sequence[Lock]
    checkpoint: int | None
    checkpoint_time: float | None
    steps: int

    @property
    def newest_step(self) -> int:
        """The newest one known of, a checkpoint behind it or not."""
        return max([self.measured.step, self.checkpoint or 0, *(beat.step for beat in self.beats)])

    @property
    def last_sign(self) -> float:
        """When something of the run was seen for the last time: nobody writes down when a killed run ended."""
        events = [time_of(event) for event in self.ledger[-1:]]
        return max([*events, *(beat.time for beat in self.beats), self.checkpoint_time or 0.0])


def judge(evidence: Evidence) -> tuple[str, str]:
    """(state, why in words)."""
    last = last_turn(evidence.ledger)
    is_over = last is not None and not _goes_on_after(last)
    # a rank that was killed leaves its heartbeat behind
    beats = [
        beat for beat in evidence.beats if last is None or not is_over or beat.time > time_of(last)
    ]
    if any(lock.is_held for lock in evidence.locks) or any(is_alive(beat) for beat in beats):
        return "running", _what_it_does(last, beats, evidence.now)
    if not is_over and (silence := _silence_elsewhere(evidence, beats)) is not None:
        if silence < SILENT_SECONDS:
            return "running", _what_it_does(last, beats, evidence.now)
        host = beats[0].host if beats else evidence.locks[0].host
        return "silent", f"no sign of life from {host} for {duration(silence)}"
    return _waiting_or_cancelled(evidence, last) or _how_it_ended(evidence, last)


def goodput(evidence: Evidence, is_running: bool) -> float | None:
    """The share of the run's time so far that went into steps which count; None before the first one."""
    end = evidence.now if is_running else evidence.last_sign
    return time_spent.goodput(
        evidence.measured.seconds, time_spent.elapsed_seconds(evidence.ledger, end)
    )


def _waiting_or_cancelled(evidence: Evidence, last: Event | None) -> tuple[str, str] | None:
    order = last_of(evidence.ledger, "cancelled")
    job = str(order["job"]) if order is not None else ""
    begun, submitted, cancelled = (
        0.0 if event is None else time_of(event)
        for event in (
            last_of([event for event in evidence.ledger if not begins_in(event, job)], *BEGINNINGS),
            last_of(evidence.ledger, "submitted"),
            order,
        )
    )
    if cancelled > max(begun, submitted):
        return "cancelled", f"after step {evidence.newest_step:,}"
    if submitted > (0.0 if last is None else time_of(last)):
        return "queued", "submitted, and not begun since"
    if last is None or last["event"] != "job_ended":
        return None
    if last["why"] == "cancelled":
        return "cancelled", f"after step {evidence.newest_step:,}"
    if last.get("next") == "give up":
        return "failed", last["why"]
    if is_interruption(last):
        # its supervisor has put it back into the queue, or Slurm has
        return ("preempted" if last["why"] == "preempted" else "requeued"), last["why"]
    return None


def _how_it_ended(evidence: Evidence, last: Event | None) -> tuple[str, str]:
    if last is None:
        return "new", "no attempt has begun"
    end = last_end(evidence.ledger)
    if end is not None and not _goes_on_after(last):
        if is_finished(end):
            return _finished(evidence)
        if is_request(end):
            return "stopped", f"stopped on request after step {end.get('step', 0):,}"
        if end.get("next") in ("give up", "refused"):
            failure = last_failure(evidence.ledger)
            return "failed", failure[0] if failure else ""
    when = datetime.datetime.fromtimestamp(evidence.last_sign).strftime("%Y-%m-%d %H:%M:%S")
    return "failed", f"its processes {LOST} after {when}; they were killed, or the host went down"


def _finished(evidence: Evidence) -> tuple[str, str]:
    if evidence.newest_step >= evidence.steps:
        return "done", ""
    return (
        "stopped",
        f"finished after step {evidence.newest_step:,}, but the run now asks for {evidence.steps:,}",
    )


def _goes_on_after(turn: Event) -> bool:
    """Whether somebody should be at work after this event."""
    return is_beginning(turn) or turn["event"] == "job_started" or turn.get("next") == "retry"


def _silence_elsewhere(evidence: Evidence, beats: Sequence[Beat]) -> float | None:
    """Seconds since the last sign of life from another host; None without any."""
    times = [beat.time for beat in beats if is_alive(beat) is None]
    times += [lock.since for lock in evidence.locks if lock.is_held is None]
    return evidence.now - max(times) if times else None


def _what_it_does(last: Event | None, beats: Sequence[Beat], now: float) -> str:
    if last is not None and last.get("next") == "retry":
        return f"starting again: {last.get('reason', 'the last attempt failed')}"
    if not beats:
        return "" if last is not None and is_beginning(last) else "starting"
    newest = max(beats, key=lambda beat: beat.time)
    doing = {"save": "saving a checkpoint", "evaluate": "evaluating", "start": "starting"}.get(
        newest.phase, ""
    )
    if now - newest.time > SILENT_SECONDS:
        return f"no progress for {duration(now - newest.time)}" + (
            f" while {doing}" if doing else ""
        )
    return doing
