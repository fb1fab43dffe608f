"""A run's history: functions of its events, given oldest first. Torch-free.

They return which checkpoints the run has published and not undone, what interrupted the run, which
data it skips, and how it spent its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pretrain.checkpoint.facts import EVER, AttemptHistory, Destination, Fact, Past
from pretrain.config.phases import SettingChange
from pretrain.config.run import OF_RATE, OF_UPDATES
from pretrain.rundir.events import (
    PLANNED,
    UNEVENTFUL,
    AttemptEnded,
    Branched,
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
    SettingsChanged,
    Submitted,
    SupervisorKilled,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.metrics_file import MetricsSummary, TimeSpent

E = TypeVar("E", bound=Event)
STARTS_AND_ENDS = (TrainingBegan, TrainingEnded, AttemptEnded)  # of training, not of jobs
_FAILED = (NextAction.RETRY, NextAction.GIVE_UP, NextAction.REFUSED)


def attempt_history(ledger: Sequence[Event]) -> AttemptHistory:
    """Return the last step of each attempt that no later start, rewind or restore has undone."""
    # Earlier versions recorded no Published, and their checkpoints do not name their attempt. So
    # `unknown` is the limit of the last start before the first Published.
    first_published = next(
        (n for n, event in enumerate(ledger) if isinstance(event, Published)), None
    )
    standing: dict[str, int] = {}
    unknown: int | None = None
    # From the last event back, `limit` is the lowest step that a later event went back to.
    limit = EVER
    for number, event in reversed(list(enumerate(ledger))):
        if isinstance(event, TrainingBegan):
            standing[event.attempt] = limit
            if unknown is None and (first_published is None or number < first_published):
                unknown = limit
        back_to = _back_to(event)
        limit = limit if back_to is None else min(limit, back_to)
    return AttemptHistory(standing, limit if unknown is None else unknown)


def past_of(ledger: Sequence[Event], root: str, store: str = "") -> Past:
    """Return what the ledger says to a start; `root` names the run directory's checkpoints, and
    `store` is the URL that the run is uploaded to now, if any."""
    history, stored = attempt_history(ledger), last_stored(ledger)
    urls = filter(None, (store, stored.url if stored else ""))
    began = last_event(ledger, TrainingBegan)
    last = last_event(ledger, TrainingBegan, Restored, ResumeFrom)
    branched = {} if find_events(ledger, Branched) else None
    is_new = began is None and not find_events(ledger, Restored)
    return Past(
        facts=_facts(ledger, root, history),
        history=history,
        asked=last.step if isinstance(last, ResumeFrom) else None,
        stores=() if is_new else tuple(dict.fromkeys(urls)),
        saved=tuple(sorted({event.step for event in find_events(ledger, Published, Mirrored)})),
        stored=Fact(stored.step, Destination.STORE, stored.url) if stored else None,
        windows=tuple((window.start, window.stop) for window in skipped_windows(ledger)),
        shortages=tuple(
            (event.micro_batch_lanes, event.settings) for event in find_events(ledger, OutOfMemory)
        ),
        environment=began.environment if began else branched,
    )


def _facts(ledger: Sequence[Event], root: str, history: AttemptHistory) -> tuple[Fact, ...]:
    """Return the checkpoints that the run has published and not undone. `root` names its
    directory's.

    Earlier versions recorded no Published; for these, take the steps where starts began and ended.
    """
    facts: list[Fact] = []
    has_published = False
    names = {Destination.RUN_DIRECTORY: root, Destination.NODES: Destination.NODES.value}
    for event in ledger:
        if (back_to := _back_to(event)) is not None:
            facts = [fact for fact in facts if fact.step <= back_to]
        match event:
            case Published(step=step, attempt=attempt, destination=where):
                has_published = True
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
            case AttemptEnded(step=step) if not has_published:
                facts.append(Fact(step, Destination.RUN_DIRECTORY, root))
            case ResumeFrom():
                has_published = True  # written only by versions that write Published, too
            case _:
                pass
    return tuple(dict.fromkeys(fact for fact in facts if fact.step))


def _back_to(event: Event) -> int | None:
    """Return the step that the run continues from after this event, if the event sets it."""
    match event:
        case TrainingBegan(step=step) | Restored(step=step):
            return step
        case Rewind(to_step=step):
            return step
        case _:
            return None


def setting_changes(ledger: Sequence[Event]) -> list[SettingChange]:
    """Return the changes of settings of updates that still hold: a resume from a step replaces the
    changes that earlier resumes made from there on of the same setting, or also of the rate."""
    changes: list[SettingChange] = []
    for event in find_events(ledger, SettingsChanged, Branched):
        if isinstance(event, Branched):
            changes = [SettingChange(*change) for change in event.changes]
            continue
        pairs = {key: pair for key, pair in event.changes.items() if key.startswith(OF_UPDATES)}
        kinds = (*pairs, *(OF_RATE if any(key.startswith(OF_RATE) for key in pairs) else ()))
        replaced = [c for c in changes if c.step >= event.step and c.setting.startswith(kinds)]
        for c in reversed(replaced):  # ends with what held at the step
            pairs[c.setting] = (c.old, pairs.get(c.setting, (c.old, c.new))[1])
        changes = [change for change in changes if change not in replaced]
        changes += [SettingChange(event.step, k, *p) for k, p in pairs.items() if p[0] != p[1]]
    return changes


def recorded_settings(ledger: Sequence[Event]) -> dict[str, Any] | None:
    """Return all settings of the run, as the last event has them; None before its first start."""
    return next(filter(None, (getattr(e, "run_settings", None) for e in reversed(ledger))), None)


def find_events(ledger: Sequence[Event], *kinds: type[E]) -> list[E]:
    """Return the events of these kinds."""
    return [event for event in ledger if isinstance(event, kinds)]


def last_event(ledger: Sequence[Event], *kinds: type[E]) -> E | None:
    """Return the last event of one of these kinds."""
    return next((event for event in reversed(ledger) if isinstance(event, kinds)), None)


def last_stored(ledger: Sequence[Event]) -> Mirrored | Restored | None:
    """Return the last event that brought a checkpoint to the object store, or from there."""
    return last_event(
        [event for event in ledger if not isinstance(event, Mirrored) or not event.problem],
        Mirrored,
        Restored,
    )


def work_dirs(ledger: Sequence[Event]) -> list[str]:
    """Return the working directories of the run's jobs.

    Directory and number together identify a job, because Slurm uses numbers again.
    """
    dirs = (event.work_dir for event in find_events(ledger, Submitted))
    return list(dict.fromkeys(filter(None, dirs)))


def without_refused_jobs(ledger: Sequence[Event]) -> list[Event]:
    """Return the events without jobs that ended because another job had the run."""
    refused = {
        end.job for end in find_events(ledger, JobEnded) if end.reason is JobEndReason.RUN_IN_USE
    }
    return [event for event in ledger if getattr(event, "job", None) not in refused]


def began_in(event: Event, start: str) -> bool:
    """Return whether the event is a start of training in this job (17) or start of a job (17.2).

    It can follow the JobEnded of the same job: the supervisor writes that as soon as Slurm
    announces the end, while ranks may still be starting.
    """
    return isinstance(event, TrainingBegan) and event.attempt.startswith(f"{start}.")


def num_attempts(ledger: Sequence[Event], is_running: bool) -> int:
    """Return how often ranks were started, attempts without a first step included."""
    count, is_open = 0, False
    for event in ledger:
        if isinstance(event, TrainingBegan):
            count, is_open = count + 1, True
        elif isinstance(event, AttemptEnded):
            count, is_open = count + (not is_open), False
    return count + (is_running and not is_open)


@dataclass(frozen=True)
class Interruption:
    """An end of an attempt before the run ends. A planned one, as a time limit, is no failure."""

    time: float
    step: int
    description: str
    is_failure: bool = True


def interruptions(ledger: Sequence[Event], is_running: bool) -> list[Interruption]:
    """Return what interrupted the run, once for each attempt or job.

    A supervisor that is killed writes no event, and its ranks die with it. So an attempt without an
    end was lost if a later attempt has begun, or if no process of the run is running.
    """
    ends: list[Interruption] = []
    open_attempt: TrainingBegan | None = None
    inside: OutOfMemory | GaveUp | None = None  # why the open attempt is about to end
    ended_job = ""
    step = 0
    for before, event in zip([None, *ledger], ledger, strict=False):
        step = getattr(event, "step", None) or step
        if isinstance(event, TrainingBegan) and not (ended_job and began_in(event, ended_job)):
            if inside is not None:  # restarted within the process: the supervisor wrote no end
                ends.append(Interruption(inside.time, event.step, inside.description))
            elif open_attempt is not None:
                ends.append(_lost(event.time, event.step))
            open_attempt, inside = event, None
        elif isinstance(event, (OutOfMemory, GaveUp)):
            inside = inside or event
        elif isinstance(event, (TrainingEnded, Rewind, Interrupted)):
            open_attempt = inside = None
        elif isinstance(event, AttemptEnded):
            if event.next in _FAILED:
                # If training gave up, its own reason says more than the exit status in `cause`.
                cause = str(inside.spike) if isinstance(inside, GaveUp) else event.cause
                ends.append(Interruption(event.time, event.step, cause))
            open_attempt = inside = None
        elif isinstance(event, JobEnded):
            if event.reason not in UNEVENTFUL:
                is_failure = event.reason not in PLANNED
                ends.append(Interruption(event.time, step, event.cause, is_failure))
            open_attempt, inside, ended_job = None, None, f"{event.job}.{event.restart}"
        elif isinstance(event, NodeReplaced):
            if ends and isinstance(before, AttemptEnded):
                text = event.description
                # A failed node is itself the reason for the end; other replacements are added.
                if event.reason is not ReplacedBecause.NODE_FAILED:
                    text = f"{ends[-1].description}; {text}"
                ends[-1] = replace(ends[-1], description=text)
        elif isinstance(event, SupervisorKilled):
            ends.append(Interruption(event.time, step, "its supervisor was killed"))
            open_attempt = inside = None
        elif isinstance(event, Canceled):
            open_attempt, inside, ended_job = None, None, event.job
        elif isinstance(event, JobStarted):
            ended_job = ""  # this start can have the same job number as the ended one
    if inside is not None and not is_running:
        ends.append(Interruption(inside.time, step, inside.description))
    elif open_attempt is not None and not is_running:
        ends.append(_lost(ledger[-1].time, open_attempt.step))
    return ends


def _lost(when: float, step: int) -> Interruption:
    return Interruption(when, step, "the processes were killed, or their node went down")


def skipped_windows(ledger: Sequence[Event]) -> list[range]:
    """Return the windows of segments that rewinds skip, in order; overlapping ones are joined.

    A branch also skips the windows of its trunk.
    """
    windows: list[range] = []
    spans = [event.segments for event in find_events(ledger, Rewind)]
    spans += [span for event in find_events(ledger, Branched) for span in event.windows]
    for start, stop in sorted(spans):
        if windows and start <= windows[-1].stop:
            start, stop = windows[-1].start, max(stop, windows[-1].stop)
            windows.pop()
        windows.append(range(start, stop))
    return windows


def is_finished(event: Event) -> bool:
    """Return whether all steps were made."""
    return _end(event) in (Outcome.FINISHED, NextAction.FINISHED)


def is_stopped(event: Event) -> bool:
    """Return whether the event is a stop on request, of an attempt or before one."""
    return isinstance(event, Interrupted) or _end(event) in (Outcome.STOPPED, NextAction.STOPPED)


def _end(event: Event) -> Outcome | NextAction | None:
    if isinstance(event, TrainingEnded):
        return event.outcome
    return event.next if isinstance(event, AttemptEnded) else None


def time_spent(metrics: MetricsSummary, ledger: Sequence[Event], end: float) -> TimeSpent | None:
    """Return how the run spent its time until `end`; None before its first interval of steps."""
    # `elapsed` counts from the first start of ranks, without the time when the run was finished,
    # stopped or in Slurm's queue.
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
