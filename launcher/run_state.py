"""How a run stands, from its directory alone: journal, measurements, checkpoints, locks, signs of life.

Reads; locks and changes nothing. `launcher/queue_state.py` joins what Slurm knows.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.signs import Beat, Lock, Measured, is_alive, read_beats, read_lock, read_measured
from pretrain.checkpoint_files import MARKER, step_directory, steps_on_disk
from pretrain.console import clock
from pretrain.run_dir import RunDir

# A rank elsewhere whose last sign of life is older than this may be gone; one here is asked for by its process id.
SILENT_SECONDS = 300.0
LOCKS = ("launcher.lock", "train.lock")
_BEGINNINGS = ("start", "resume")
_FAILURES = ("retry", "give up", "refused")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One row of `launcher status`; unknown numbers are None, ages and spans are seconds."""

    name: str
    path: str
    state: str  # new, running, stopped, silent, failed, done; from Slurm: queued, requeued, preempted, cancelled
    why: str = ""
    attempts: int = 0
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    job: str | None = None  # Slurm's id
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    goodput: float | None = None
    seconds_left: float | None = None
    checkpoint: int | None = None
    checkpoint_age: float | None = None
    last_failure: str = ""
    last_failure_age: float | None = None

    @property
    def done_share(self) -> float:
        """How much of the run is behind it, 0 to 1."""
        return min(1.0, self.step / self.steps) if self.steps else 0.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the directory shows at one moment."""

    now: float
    ledger: Sequence[dict[str, Any]]
    measured: Measured
    beats: Sequence[Beat]
    locks: Sequence[Lock]
    checkpoint: int | None
    checkpoint_time: float | None
    steps: int


def read_state(run_dir: RunDir) -> RunState:
    """How the run of this directory stands now; ConfigError if it holds none."""
    config = run_dir.config
    evidence = gather(run_dir, config.optim.steps)
    state, why = judge(evidence)
    step = max(evidence.measured.step, evidence.checkpoint or 0, *(beat.step for beat in evidence.beats), 0)
    speed = evidence.measured.tokens_per_second
    left = (evidence.steps - step) * config.tokens_per_step / speed if speed and state == "running" else None
    failure = _last_failure(evidence.ledger)
    return RunState(
        name=run_dir.identity.name,
        path=str(run_dir.path),
        state=state,
        why=why,
        attempts=num_attempts(evidence.ledger, is_running=state == "running"),
        ranks=next((event["world_size"] for event in reversed(evidence.ledger) if "world_size" in event), None),
        hosts=tuple(sorted({beat.host for beat in evidence.beats})),
        step=step,
        steps=evidence.steps,
        loss=evidence.measured.loss,
        tokens_per_second=speed,
        goodput=goodput(evidence, is_running=state == "running"),
        seconds_left=left,
        checkpoint=evidence.checkpoint,
        checkpoint_age=None if evidence.checkpoint_time is None else max(0.0, evidence.now - evidence.checkpoint_time),
        last_failure=failure.get("reason", ""),
        last_failure_age=evidence.now - _time_of(failure) if failure else None,
    )


def gather(run_dir: RunDir, steps: int) -> Evidence:
    """Read all that `judge` and the numbers need."""
    published = steps_on_disk(run_dir.checkpoints)
    newest = published[-1] if published else None
    return Evidence(
        now=time.time(),
        ledger=run_dir.read_ledger(),
        measured=read_measured(run_dir.metrics),
        beats=read_beats(run_dir.heartbeats),
        locks=[lock for name in LOCKS if (lock := read_lock(run_dir.path / name))],
        checkpoint=newest,
        checkpoint_time=None if newest is None else _written(step_directory(run_dir.checkpoints, newest)),
        steps=steps,
    )


def judge(evidence: Evidence) -> tuple[str, str]:
    """(state, why in words)."""
    last = next((event for event in reversed(evidence.ledger) if _says_state(event)), None)
    is_over = last is not None and not (last["event"] in _BEGINNINGS or last.get("next") == "retry")
    # a rank that was killed leaves its heartbeat behind
    beats = [beat for beat in evidence.beats if last is None or not is_over or beat.time > _time_of(last)]
    if any(lock.is_held for lock in evidence.locks) or any(is_alive(beat) for beat in beats):
        return "running", _what_it_does(last, beats, evidence.now)
    if not is_over and (silence := _silence_elsewhere(evidence, beats)) is not None:
        if silence < SILENT_SECONDS:
            return "running", _what_it_does(last, beats, evidence.now)
        return "silent", f"no sign of life from {_host(evidence, beats)} for {clock(silence)}"
    return _how_it_ended(evidence, last)


def _how_it_ended(evidence: Evidence, last: dict[str, Any] | None) -> tuple[str, str]:
    if last is None:
        return "new", "no attempt has begun"
    if _is_finished(last):
        reached = max(evidence.checkpoint or 0, evidence.measured.step)
        if reached >= evidence.steps:
            return "done", ""
        return "stopped", f"finished after step {reached:,}, but the run now asks for {evidence.steps:,}"
    if _is_request(last):
        return "stopped", f"stopped on request after step {last.get('step', 0):,}"
    if last.get("next") in ("give up", "refused"):
        return "failed", str(last.get("reason", last["next"]))
    when = datetime.datetime.fromtimestamp(_last_sign(evidence)).strftime("%Y-%m-%d %H:%M:%S")
    return "failed", f"its processes ended without a word after {when}; they were killed, or the host went down"


def num_attempts(ledger: Sequence[dict[str, Any]], is_running: bool) -> int:
    """How many times ranks were started; an attempt that ended before its first step counts too."""
    count, is_open = 0, False
    for event in ledger:
        if event.get("event") in _BEGINNINGS:
            count, is_open = count + 1, True
        elif event.get("event") == "attempt_ended":
            count, is_open = count + (not is_open), False
    return count + (is_running and not is_open)


def goodput(evidence: Evidence, is_running: bool) -> float | None:
    """The share of the time since the run's first step that went into steps which count; None before the first one.

    Time in which it was stopped on request does not count against it. Saves, evaluations, start-up, waiting after
    failures and steps done again do.
    """
    spent, since = 0.0, None
    for event in evidence.ledger:
        if event.get("event") in _BEGINNINGS and since is None:
            since = _time_of(event)
        elif since is not None and (_is_finished(event) or _is_request(event)):
            spent, since = spent + _time_of(event) - since, None
    if since is not None:
        spent += (evidence.now if is_running else _last_sign(evidence)) - since
    return min(1.0, evidence.measured.seconds / spent) if spent > 0 and evidence.measured.seconds else None


def _silence_elsewhere(evidence: Evidence, beats: Sequence[Beat]) -> float | None:
    """Seconds since the last sign of life from another host; None without any."""
    times = [beat.time for beat in beats if is_alive(beat) is None]
    times += [lock.since for lock in evidence.locks if lock.is_held is None]
    return evidence.now - max(times) if times else None


def _host(evidence: Evidence, beats: Sequence[Beat]) -> str:
    return beats[0].host if beats else evidence.locks[0].host


def _what_it_does(last: dict[str, Any] | None, beats: Sequence[Beat], now: float) -> str:
    if last is not None and last.get("next") == "retry":
        return f"starting again: {last.get('reason', 'the last attempt failed')}"
    if not beats:
        return "starting" if last is None or last["event"] not in _BEGINNINGS else ""
    newest = max(beats, key=lambda beat: beat.time)
    doing = {"save": "saving a checkpoint", "evaluate": "evaluating", "start": "starting"}.get(newest.phase, "")
    if now - newest.time > SILENT_SECONDS:
        return f"no progress for {clock(now - newest.time)}" + (f" while {doing}" if doing else "")
    return doing


def _last_failure(ledger: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next((event for event in reversed(ledger) if event.get("next") in _FAILURES), {})


def _last_sign(evidence: Evidence) -> float:
    """When something of the run was seen for the last time: nobody writes down when a killed run ended."""
    events = [_time_of(event) for event in evidence.ledger[-1:]]
    return max([*events, *(beat.time for beat in evidence.beats), evidence.checkpoint_time or 0.0])


def _says_state(event: dict[str, Any]) -> bool:
    return event.get("event") in (*_BEGINNINGS, "stop", "finish", "attempt_ended")


def _is_finished(event: dict[str, Any]) -> bool:
    return event.get("event") == "finish" or event.get("next") == "finished"


def _is_request(event: dict[str, Any]) -> bool:
    return event.get("event") == "stop" or event.get("next") == "stopped"


def _written(checkpoint: Path) -> float | None:
    try:
        return (checkpoint / MARKER).stat().st_mtime
    except FileNotFoundError:  # it is being pruned
        return None


def _time_of(event: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(event["time"]).timestamp()
