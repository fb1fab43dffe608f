"""A run's history, RUN/ledger.jsonl: the only module that writes it, reads it and answers questions
about it.

A line is {"time": "2026-11-22T04:12:31.250+00:00", "event": "attempt_ended", FIELDS OF THE EVENT};
a field that is None is left out. Questions are functions of the events, oldest first. Torch-free.

The times of a run's events when clocks differ: nodes' clocks jump, and disagree. Pure.

The order of the ledger's lines is what happened; times only say when.

Which steps of which start are still part of a run's history, and what it has published.

What a run's time went into, and goodput: the part that went into training.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from foundation.errors import os_error_text
from foundation.files import append_whole, lines_of, parse_json, warn_of_lines
from foundation.records import built, json_text, to_json
from foundation.retry import Patience, outlast
from pretrain.checkpoint.facts import EVER, Destination, Fact, History
from pretrain.rundir.events import (
    PLANNED,
    UNEVENTFUL,
    AttemptEnded,
    Canceled,
    Event,
    GaveUp,
    Interrupted,
    JobEnded,
    JobEndReason,
    JobStarted,
    Mirrored,
    NextAction,
    NodeReplaced,
    Outcome,
    OutOfMemory,
    Published,
    ReplacedBecause,
    Restored,
    ResumeFrom,
    Rewind,
    Submitted,
    SupervisorKilled,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.metrics_file import MetricsSummary, TimeSpent

NOTABLE_SECONDS = 60.0  # by which clocks of a cluster do not differ


def in_order(events: Sequence[Event], now: float) -> tuple[list[Event], int]:
    """The events with times that never fall and are not after `now`, and how many were far off: no
    time between two events is negative, or counted twice."""
    latest, found, num_off = 0.0, [], 0
    for event in events:
        latest = max(latest, min(event.time, now))
        num_off += abs(event.time - latest) > NOTABLE_SECONDS
        found.append(replace(event, time=latest))
    return found, num_off


def history_of(ledger: Sequence[Event]) -> History:
    """Return which steps of which attempt no later start, rewind or restore has undone."""
    # Checkpoints of earlier versions do not name their attempt: those before the first fact.
    first_told = next((n for n, event in enumerate(ledger) if isinstance(event, Published)), None)
    standing, limit, unknown = dict[str, int](), EVER, None
    for number, event in reversed(list(enumerate(ledger))):
        if isinstance(event, TrainingBegan):
            standing[event.attempt] = limit
            if unknown is None and (first_told is None or number < first_told):
                unknown = limit
        back_to = _back_to(event)
        limit = limit if back_to is None else min(limit, back_to)
    return History(standing, limit if unknown is None else unknown)


def facts_of(ledger: Sequence[Event], root: str, nodes: str = "nodes' disks") -> list[Fact]:
    """Return what the run has published and not undone; `root` names the run directory's.

    Starts of earlier versions told less: from which step they began and where they ended.
    """
    history, facts, tells = history_of(ledger), list[Fact](), False
    names = {Destination.RUN_DIRECTORY: root, Destination.NODES: nodes}
    for event in ledger:
        if (back_to := _back_to(event)) is not None:
            facts = [fact for fact in facts if fact.step <= back_to]
        match event:
            case Published(step=step, attempt=attempt, destination=where):
                tells = True
                if history.stands(step, attempt):
                    facts.append(Fact(step, where, names.get(where, "")))
            case Mirrored(step=step, url=url, problem=""):
                facts.append(Fact(step, Destination.STORE, url))
            case Restored(step=step, url=url):
                facts = [fact for fact in facts if fact.destination is Destination.STORE]
                facts.append(Fact(step, Destination.STORE, url))
                facts.append(Fact(step, Destination.RUN_DIRECTORY, root))
            case (
                TrainingBegan(step=step, local=False)
                | TrainingEnded(step=step, outcome=Outcome.FINISHED | Outcome.STOPPED)
            ):
                facts.append(Fact(step, Destination.RUN_DIRECTORY, root))
            case AttemptEnded(step=step) if not tells:
                facts.append(Fact(step, Destination.RUN_DIRECTORY, root))
            case ResumeFrom():
                tells = True
            case _:
                pass
    return list(dict.fromkeys(fact for fact in facts if fact.step))


def _back_to(event: Event) -> int | None:
    """Return the step that the run goes back to with this event, if it does."""
    match event:
        case TrainingBegan(step=step) | Restored(step=step):
            return step
        case Rewind(to_step=step):
            return step
        case _:
            return None


def asked_step(ledger: Sequence[Event]) -> int | None:
    """Return the step that a user wants the next start to resume from, if one has said so."""
    last = last_of(ledger, TrainingBegan, Restored, ResumeFrom)
    return last.step if isinstance(last, ResumeFrom) else None


E = TypeVar("E", bound=Event)
EVENTS = {kind.name(): kind for kind in Event.__subclasses__()}
_FAILED = (NextAction.RETRY, NextAction.GIVE_UP, NextAction.REFUSED)
_log = logging.getLogger(__name__)


class Ledger:
    """The file. The constructor touches nothing."""

    def __init__(self, path: Path, patience: Patience | None = None) -> None:
        self.path = path
        self._patience = patience or Patience()

    def append(self, event: Event) -> None:
        """Add an event, with the time; it is on disk when this returns.

        Waits for storage that fails, as long as the patience lasts.
        """
        event = replace(event, time=time.time())
        outlast(self._patience, lambda: self._write(event))

    def append_if_possible(self, event: Event) -> None:
        """Add an event that nothing waits for: if storage fails, it is in the log alone."""
        try:
            self._write(replace(event, time=time.time()))
        except OSError as error:
            _log.warning("not in the ledger: %s: %s", event.description, os_error_text(error))

    def _write(self, event: Event) -> None:
        append_whole(self.path, line_of(event), sync=True)

    def history(self) -> list[Event]:
        """The events of the run, at times that can be subtracted from each other and from now.

        One warning says so if clocks differed; events of jobs that another job kept out are left
        out.
        """
        events, num_off = in_order(without_refused_jobs(self.read()), time.time())
        if num_off:
            what = "events have times in the future or out of order"
            _log.warning(
                "%s: %d %s; clocks differ, durations are estimates", self.path, num_off, what
            )
        return events

    def read(self) -> list[Event]:
        """All events, oldest first.

        Lines that are damaged or unknown are skipped with one warning.
        """
        events, unusable = [], []
        for number, line in enumerate(lines_of(self.path), start=1):
            if not line.strip():
                continue
            try:
                tree = parse_json(line)
                when = datetime.datetime.fromisoformat(tree.pop("time"))
                when = when.astimezone(datetime.timezone.utc).timestamp()
                events.append(built(EVENTS[tree.pop("event")], {**tree, "time": when}))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                unusable.append(number)
        warn_of_lines(_log, self.path, "an event", unusable)
        return events


def line_of(event: Event) -> bytes:
    """The event as its line in the file."""
    fields = to_json(event)
    when = datetime.datetime.fromtimestamp(fields.pop("time"), datetime.timezone.utc)
    head = {"time": when.isoformat(timespec="milliseconds"), "event": event.name()}
    values = {name: value for name, value in fields.items() if value is not None}
    return json_text(head | values).encode() + b"\n"


# ------------------------------------------------------------------------------------- questions


def events_of(ledger: Sequence[Event], *kinds: type[E]) -> list[E]:
    """The events of these kinds."""
    return [event for event in ledger if isinstance(event, kinds)]


def last_of(ledger: Sequence[Event], *kinds: type[E]) -> E | None:
    """The last event of one of these kinds."""
    return next((event for event in reversed(ledger) if isinstance(event, kinds)), None)


def last_stored(ledger: Sequence[Event]) -> Mirrored | Restored | None:
    """The last event that says which checkpoint is in the object store."""
    stored = events_of(ledger, Mirrored, Restored)
    return next((e for e in stored[::-1] if isinstance(e, Restored) or not e.problem), None)


def work_dirs(ledger: Sequence[Event]) -> list[str]:
    """Where the run's jobs work: Slurm uses the numbers of jobs again."""
    dirs = (event.work_dir for event in events_of(ledger, Submitted))
    return list(dict.fromkeys(filter(None, dirs)))


def without_refused_jobs(ledger: Sequence[Event]) -> list[Event]:
    """The events except for those of jobs that ended because another job had the run."""
    refused = {
        end.job for end in events_of(ledger, JobEnded) if end.reason is JobEndReason.RUN_IN_USE
    }
    return [event for event in ledger if getattr(event, "job", None) not in refused]


def began_in(event: Event, start: str) -> bool:
    """Whether ranks of this job (17), or of this start of a job (17.2), began to train.

    They may write that after the end of their job, which its supervisor writes as soon as Slurm
    announces it.
    """
    return isinstance(event, TrainingBegan) and event.attempt.startswith(f"{start}.")


def num_attempts(ledger: Sequence[Event], is_running: bool) -> int:
    """How often ranks were started; an attempt that ended before its first step counts too."""
    count, is_open = 0, False
    for event in ledger:
        if isinstance(event, TrainingBegan):
            count, is_open = count + 1, True
        elif isinstance(event, AttemptEnded):
            count, is_open = count + (not is_open), False
    return count + (is_running and not is_open)


@dataclass(frozen=True)
class Interruption:
    """An unplanned end of an attempt, or one that Slurm imposed.

    The latter is no failure of the run.
    """

    time: float
    step: int
    description: str
    is_failure: bool = True


def interruptions(ledger: Sequence[Event], is_running: bool) -> list[Interruption]:
    """What interrupted the run, once for each attempt or job.

    A supervisor that is killed writes nothing, and its ranks die with it. So an attempt without an
    end is one that was lost: when the next one begins, or when nothing of the run is running any
    more.
    """
    found: list[Interruption] = []
    open_attempt: TrainingBegan | None = None
    inside: OutOfMemory | GaveUp | None = None  # why the open attempt is about to end
    ended_job, step = "", 0
    for before, event in zip([None, *ledger], ledger, strict=False):
        step = getattr(event, "step", None) or step
        if isinstance(event, TrainingBegan) and not (ended_job and began_in(event, ended_job)):
            if inside is not None:  # restarted within the process, without a supervisor's word
                found.append(Interruption(inside.time, event.step, inside.description))
            elif open_attempt is not None:
                found.append(_lost(event.time, event.step))
            open_attempt, inside = event, None
        elif isinstance(event, (OutOfMemory, GaveUp)):
            inside = inside or event
        elif isinstance(event, (TrainingEnded, Rewind, Interrupted)):
            open_attempt = inside = None
        elif isinstance(event, AttemptEnded):
            if event.next in _FAILED:
                # where training gave up by itself, the supervisor only saw a rank's exit status
                cause = str(inside.spike) if isinstance(inside, GaveUp) else event.cause
                found.append(Interruption(event.time, event.step, cause))
            open_attempt = inside = None
        elif isinstance(event, JobEnded):
            if event.reason not in UNEVENTFUL:
                is_failure = event.reason not in PLANNED
                found.append(Interruption(event.time, step, event.cause, is_failure))
            open_attempt, inside, ended_job = None, None, f"{event.job}.{event.restart}"
        elif isinstance(event, NodeReplaced):
            if found and isinstance(before, AttemptEnded):
                words = event.description
                if event.reason is not ReplacedBecause.NODE_FAILED:  # else this is why it ended
                    words = f"{found[-1].description}; {words}"
                found[-1] = replace(found[-1], description=words)
        elif isinstance(event, SupervisorKilled):
            found.append(Interruption(event.time, step, "its supervisor was killed"))
            open_attempt = inside = None
        elif isinstance(event, Canceled):
            open_attempt, inside, ended_job = None, None, event.job
        elif isinstance(event, JobStarted):  # which may have the number of the one that ended
            ended_job = ""
    if inside is not None and not is_running:
        found.append(Interruption(inside.time, step, inside.description))
    elif open_attempt is not None and not is_running:
        found.append(_lost(ledger[-1].time, open_attempt.step))
    return found


def _lost(when: float, step: int) -> Interruption:
    return Interruption(when, step, "the processes were killed, or their node went down")


def skipped_windows(ledger: Sequence[Event]) -> list[range]:
    """The windows of segments that rewinds skip, in order; overlapping ones are joined."""
    windows: list[range] = []
    for start, stop in sorted(event.segments for event in events_of(ledger, Rewind)):
        if windows and start <= windows[-1].stop:
            start, stop = windows[-1].start, max(stop, windows[-1].stop)
            windows.pop()
        windows.append(range(start, stop))
    return windows


def is_finished(event: Event) -> bool:
    """Whether all steps were made."""
    return _how(event) in (Outcome.FINISHED, NextAction.FINISHED)


def is_stopped(event: Event) -> bool:
    """Whether an attempt stopped on request, or none was made any more."""
    return isinstance(event, Interrupted) or _how(event) in (Outcome.STOPPED, NextAction.STOPPED)


def _how(event: Event) -> Outcome | NextAction | None:
    if isinstance(event, TrainingEnded):
        return event.outcome
    return event.next if isinstance(event, AttemptEnded) else None


def time_spent(metrics: MetricsSummary, ledger: Sequence[Event], end: float) -> TimeSpent | None:
    """Return what the time until `end` went into; None before a first interval of steps."""
    # Neither finished, stopped nor in Slurm's queue, since the first start of ranks.
    elapsed, since, has_begun = 0.0, None, False
    for event in ledger:
        has_begun = has_begun or isinstance(event, TrainingBegan)
        if since is None and has_begun and isinstance(event, (TrainingBegan, JobStarted)):
            since = event.time
        elif since is not None and (
            is_finished(event) or is_stopped(event) or isinstance(event, JobEnded)
        ):
            elapsed, since = elapsed + event.time - since, None
    if since is not None:
        elapsed += end - since
    if elapsed <= 0 or not metrics.spent.steps:
        return None
    return replace(metrics.spent, restarts=max(0.0, elapsed - metrics.spent.total))
