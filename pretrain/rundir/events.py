"""What can happen to a run, as data: the events of its ranks, supervisors, Slurm jobs and commands.

A frozen dataclass per kind of event, which `ledger.py` stores and reads. Reasons and next actions
are enums. All text about events is at the end of this file, and is never parsed. Torch-free.
"""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from pretrain.checkpoint.facts import Destination
from pretrain.rundir.exit_statuses import EXIT_STOPPED, describe_exit
from pretrain.terminal.text import counted

# The signal that tells rank 0 to look for a `Requested`. Processes without a handler ignore it.
ASK = signal.SIGURG


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the ledger. `time` is set when the event is written: seconds since 1970."""

    time: float = field(default=0.0, compare=False)

    @classmethod
    def name(cls) -> str:
        """`AttemptEnded` is stored as `attempt_ended`."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def description(self) -> str:
        """What happened, for a reader who does not know the names of fields."""
        return _description(self)


@dataclass(frozen=True, kw_only=True)
class TrainingBegan(Event):
    """Training began: from initial weights, or from the checkpoint of `step`.

    `attempt` is its fencing token: JOB.RESTART.NUMBER.RANDOM on Slurm. `changes` says what differs
    from the previous attempt's environment: name -> [old, new]. After any change, results are no
    longer bitwise as in an uninterrupted run.
    """

    step: int
    world_size: int
    attempt: str = ""
    code: str = ""  # version of the source code
    environment: dict[str, str] = field(default_factory=dict)  # versions, devices, threads
    tokenizer: str = ""  # fingerprint of the corpus' tokenizer
    validation: str = ""  # hash of the validation split's manifest
    sets: dict[str, str] = field(default_factory=dict)  # name of an evaluation set -> hash
    corpora: dict[str, str] = field(default_factory=dict)  # path or URL -> manifest_hash
    changes: dict[str, tuple[str, str]] = field(default_factory=dict)
    local: bool = False  # it resumed from the ranks' local checkpoints
    run_settings: dict[str, Any] | None = None  # all settings of the run, at its first start


class Outcome(Enum):
    """Why an attempt within a rank's process ended."""

    # The loop returned, and a checkpoint of its last step is on disk.
    FINISHED = "finished"
    PHASE_FINISHED = "phase_finished"
    STOPPED = "stopped"
    # It raised.
    DIVERGED = "diverged"
    OUT_OF_MEMORY = "out_of_memory"
    UNREADABLE = "unreadable"  # the checkpoint that it was to resume from


@dataclass(frozen=True, kw_only=True)
class TrainingEnded(Event):
    """The loop returned after `step`. The other fields say what its lanes had read by then."""

    outcome: Outcome
    step: int
    world_size: int = 0
    attempt: str = ""
    lanes: int = 0
    lane_seed: int = 0
    segment_length: int = 0
    tokens_of_corpora: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SettingsChanged(Event):
    """A start changed settings of the run: name -> [old, new].

    Settings of updates hold from the update after `step` on (`pretrain/config/phases.py`).
    """

    changes: dict[str, tuple[Any, Any]]
    run_settings: dict[str, Any] | None = None  # all settings of the run since then
    step: int = 0  # that the start resumed from; earlier versions did not record it


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Event):
    """A rank ran out of memory; how much it needs depends on these `settings`."""

    rank: int
    micro_batch_lanes: int
    settings: dict[str, Any] = field(default_factory=dict)
    message: str = ""  # of the allocator


@dataclass(frozen=True, kw_only=True)
class Published(Event):
    """The checkpoint of `step`, which `attempt` has saved, is whole at the destination."""

    step: int
    attempt: str
    destination: Destination = Destination.RUN_DIRECTORY


@dataclass(frozen=True, kw_only=True)
class ResumeFrom(Event):
    """A user wants the next start to resume from `step`, whatever was published since. None: a
    start has refused that request."""

    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast(Event):
    """The run's loss was forecast by a card with this hash, before it began."""

    sha256: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Requested(Event):
    """A user asks for this after the step in progress. Then rank 0 gets the signal ASK."""

    request: Literal["save", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Mirrored(Event):
    """The checkpoint of `step` is in the object store at `url`, read back and compared; with a
    `problem` it is not, and the upload is tried again."""

    step: int
    url: str
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """The run directory was made from the store, to resume from the checkpoint of `step`."""

    step: int
    url: str


@dataclass(frozen=True, kw_only=True)
class Branched(Event):
    """The run began with the checkpoint of `step` of the run in the directory `origin`.

    It skips the same `windows` of segments. `changes` happened to its settings until then,
    as (step, setting, old value, new value). `tokenizer`, `validation` and `sets` are of the last
    start of that run.
    """

    step: int
    origin: str
    windows: tuple[tuple[int, int], ...] = ()
    changes: tuple[tuple[int, str, Any, Any], ...] = ()
    tokenizer: str = ""
    validation: str = ""
    sets: dict[str, str] = field(default_factory=dict)
    run_settings: dict[str, Any] | None = None  # all settings of the run


@dataclass(frozen=True, kw_only=True)
class Slowdown(Event):
    """Steps until `step` took `seconds` longer than usual, because of `rank` if it is given. With a
    `ratio`, that rank takes `ratio` times as long as the others for its part of every step."""

    step: int
    seconds: float
    rank: int | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Spike:
    """Consecutive steps, up to the latest, with anomalous losses or skipped updates.

    Or the last steps, if too many of them were `skipped`, or if there is a `problem` after them.
    """

    first_step: int
    last_step: int
    loss: float | None = None  # the highest; None if every step was skipped
    usual: float | None = None  # the median loss before
    skipped: int | None = None  # updates
    problem: str = ""  # what is not finite after the last step

    def __str__(self) -> str:
        if self.problem:
            return f"after step {self.last_step} {self.problem}"
        is_one = self.first_step == self.last_step
        steps = f"steps {self.first_step} to {self.last_step}"
        steps = f"step {self.last_step}" if is_one else steps
        if self.skipped is not None:
            updates = self.last_step - self.first_step + 1
            return f"{self.skipped} of the {updates} updates of {steps} were skipped"
        if self.loss is None or self.usual is None:
            return f"{steps} was skipped" if is_one else f"{steps} were all skipped"
        return f"{steps} had losses up to {self.loss:.3f} where {self.usual:.3f} was usual"


@dataclass(frozen=True, kw_only=True)
class Rewind(Event):
    """The run goes back to `to_step` and skips the `segments` [start, stop) of every lane."""

    spike: Spike
    to_step: int
    segments: tuple[int, int]

    @property
    def step(self) -> int:
        return self.spike.last_step


@dataclass(frozen=True, kw_only=True)
class GaveUp(Event):
    """A spike that the run cannot rewind from."""

    spike: Spike

    @property
    def step(self) -> int:
        return self.spike.last_step


@dataclass(frozen=True, kw_only=True)
class UnresolvedSpike(Event):
    """A run or a phase ended in what may be a spike; `before`: step of the checkpoint before it."""

    spike: Spike
    before: int | None = None

    @property
    def step(self) -> int:
        return self.spike.last_step


class NextAction(Enum):
    """What follows an attempt."""

    FINISHED = "finished"
    STOPPED = "stopped"  # on request, after a checkpoint or before the first step
    REFUSED = "refused"  # a setting or a file is wrong, so another attempt would fail the same way
    RETRY = "retry"
    REQUEUE = "requeue"  # in another start of the job, perhaps on other nodes
    GIVE_UP = "give_up"


class AttemptReason(Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    STOP_REQUESTED = "stop_requested"
    USER_ERROR = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    NODE_UNUSABLE = "node_unusable"  # a rank on the node has reported that
    RANK_FAILED = "rank_failed"
    SITE_FAILED = "site_failed"  # storage, or memory of a host
    NOT_STARTED = "not_started"  # a rank's program was not run, and no rank failed by itself
    UNSAVED = "unsaved"  # every rank finished, and no checkpoint holds the last step


class JobEndReason(Enum):
    """Why one start of a Slurm job ended."""

    FINISHED = "finished"
    GAVE_UP = "gave_up"  # the supervisor gave up, or the ranks refused their settings
    ERROR = "error"  # the job cannot run its ranks at all; the message says why
    RUN_IN_USE = "run_in_use"  # another job has the run
    CANCELED = "canceled"
    STOP_REQUESTED = "stop_requested"
    TIME_LIMIT = "time_limit"
    TIME_LIMIT_NEAR = "time_limit_near"
    PREEMPTED = "preempted"
    REQUEUED_BY_USER = "requeued_by_user"
    NODE_FAILED = "node_failed"
    FIRST_NODE_LOST = "first_node_lost"  # or its storage was lost; the next start writes this
    NODE_EXCLUDED = "node_excluded"  # requeued to start without this node
    NOT_STARTED = "not_started"  # no attempt could start here, for the reason in the message
    NO_STEPS = "no_steps"  # Slurm starts no more steps in this start, but may in the next
    SUPERVISOR_FAILED = "supervisor_failed"  # with the error in the message
    PROLOG_FAILED = "prolog_failed"  # Slurm has drained the node and holds the job
    ENDED_BY_SLURM = "ended_by_slurm"
    FORGOTTEN = "forgotten"  # the controller lost it, and may use its restart number again


class ReplacedBecause(Enum):
    """Why a node of a job trains no more."""

    NODE_FAILED = "node_failed"
    NOT_RESPONDING = "not_responding"
    RANKS_FAILED = "ranks_failed"
    RUN_DIRECTORY_UNSEEN = "run_directory_unseen"
    UNREADY = "unready"  # it does not respond, or does not start the ranks' program


# How a job ended when nothing interrupted the run, or when other events show what did.
UNEVENTFUL = (JobEndReason.FINISHED, JobEndReason.GAVE_UP, JobEndReason.CANCELED)
# Interruptions that belong to sharing a cluster; any other is a failure.
PLANNED = (
    JobEndReason.STOP_REQUESTED,
    JobEndReason.TIME_LIMIT,
    JobEndReason.TIME_LIMIT_NEAR,
    JobEndReason.PREEMPTED,
    JobEndReason.REQUEUED_BY_USER,
)


@dataclass(frozen=True, kw_only=True)
class AttemptEnded(Event):
    """All ranks of an attempt have exited, and the supervisor has decided what follows."""

    attempt_number: int
    statuses: tuple[int, ...]  # in rank order; -N: killed by signal N
    step_before: int  # of the latest checkpoint when it started
    step: int  # of the latest checkpoint now
    reason: AttemptReason
    next: NextAction
    first_failure: int | None = None  # the rank that failed first, or was unresponsive, where known
    without_progress: int = 0  # attempts in a row without a newer checkpoint, this one included
    job: str | None = None

    @property
    def cause(self) -> str:
        """Why it ended; if the supervisor gave up, also after how many attempts."""
        rank, count = self.first_failure, self.without_progress
        if self.reason is AttemptReason.HANG:
            cause = "the ranks hung" + ("" if rank is None else f"; rank {rank} was unresponsive")
        elif self.reason in (
            AttemptReason.RANK_FAILED,
            AttemptReason.NOT_STARTED,
            AttemptReason.NODE_UNUSABLE,
        ):
            if rank is None:
                done = (0, EXIT_STOPPED)
                rank = next(n for n, status in enumerate(self.statuses) if status not in done)
            cause = f"rank {rank} {describe_exit(self.statuses[rank])}"
        else:
            cause = _ATTEMPT_CAUSES[self.reason]
        if self.next is not NextAction.GIVE_UP or not count:
            return cause
        times = "attempt" if count == 1 else f"{count} attempts in a row"
        return f"{cause}; {times} brought no checkpoint beyond step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """The supervisor was asked to stop while no ranks ran that could save."""

    signal: str  # the name of the signal that asked
    step: int  # of the latest checkpoint


@dataclass(frozen=True, kw_only=True)
class Submitted(Event):
    job: str  # 17, or 17_3 for a task of an array
    job_name: str = ""
    work_dir: str = ""  # as Slurm reports it; together with its number it identifies the job


@dataclass(frozen=True, kw_only=True)
class Canceled(Event):
    job: str
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class JobStarted(Event):
    """The supervisor of a job's start number `restart` runs."""

    job: str
    restart: int
    nodes: tuple[str, ...]
    step: int  # of the latest checkpoint
    began: str = ""  # as Slurm reports it: a start that Slurm forgot may have the same number


@dataclass(frozen=True, kw_only=True)
class JobEnded(Event):
    """A start of a job ended. If its first node was lost, the next start writes this."""

    job: str
    restart: int
    reason: JobEndReason
    requeued: bool  # by the supervisor; Slurm may requeue a job too
    node: str | None = None  # one that failed, or n1,n2 that the next start excludes
    other_job: str | None = None  # the job that has the run
    message: str = ""
    is_final: bool = False  # Slurm does not requeue it: 'launcher resume' continues the run
    step: int | None = None  # of the latest checkpoint
    step_before: int | None = None  # the same when the start, or its supervisor, began

    @property
    def cause(self) -> str:
        """Why it ended."""
        cause = _JOB_CAUSES.get(self.reason, _words(self.reason))
        return cause.format(self, f"node {self.node}" if self.node else "a node")


@dataclass(frozen=True, kw_only=True)
class NodeReplaced(Event):
    """The next attempts of this start of the job use the node `spare` instead of `node`."""

    job: str
    node: str
    spare: str
    reason: ReplacedBecause


@dataclass(frozen=True, kw_only=True)
class NodesUnready(Event):
    """Nodes of the job cannot run ranks now: node -> why. The supervisor waits for them."""

    job: str
    problems: dict[str, str]

    @property
    def cause(self) -> str:
        """What is wrong with each node; for five and more, their number and the first."""
        problems = [f"{node} {problem}" for node, problem in self.problems.items()]
        more = f"{len(problems)} nodes, such as {problems[0]}" if problems[4:] else ""
        return more or "; ".join(problems)


@dataclass(frozen=True, kw_only=True)
class SupervisorKilled(Event):
    """The supervisor of a job's start was killed. Its successor in that start writes this."""

    job: str
    restart: int
    step_before: int  # of the latest checkpoint when the killed one began
    step: int  # of the latest checkpoint now


# ------------------------------------------------------------------------------------------- text

_ATTEMPT_CAUSES = {
    AttemptReason.FINISHED: "every rank finished",
    AttemptReason.STOP_REQUESTED: "stopped on request",
    AttemptReason.USER_ERROR: "a setting or a file has to change first",
    AttemptReason.OUT_OF_MEMORY: "out of memory; continuing with half the lanes per forward pass",
    AttemptReason.SITE_FAILED: "storage or host memory failed",
    AttemptReason.UNSAVED: "no checkpoint holds the last step",
}
_REPLACEMENT_CAUSES = {
    ReplacedBecause.NODE_FAILED: "node {} failed",
    ReplacedBecause.NOT_RESPONDING: "node {} is drained or does not respond",
    ReplacedBecause.RANKS_FAILED: "ranks failed on node {}",
    ReplacedBecause.UNREADY: "node {} could not start the ranks' program",
    ReplacedBecause.RUN_DIRECTORY_UNSEEN: "node {} does not see the run directory",
}
_JOB_CAUSES = {
    JobEndReason.ERROR: "{0.message}",
    JobEndReason.NOT_STARTED: "{0.message}",
    JobEndReason.NO_STEPS: "Slurm starts no more steps in it",
    JobEndReason.SUPERVISOR_FAILED: "the supervisor failed: {0.message}",
    JobEndReason.NODE_FAILED: "{1} failed",
    JobEndReason.PROLOG_FAILED: "the prolog failed on {1}",
    JobEndReason.NODE_EXCLUDED: "ranks failed on {1}",
    JobEndReason.RUN_IN_USE: "job {0.other_job} has the run",
    JobEndReason.GAVE_UP: "the supervisor gave up",
    JobEndReason.STOP_REQUESTED: "asked to stop",
    JobEndReason.REQUEUED_BY_USER: "requeued by a user, or by Slurm",
    JobEndReason.FIRST_NODE_LOST: "its first node or its storage was lost",
    JobEndReason.ENDED_BY_SLURM: "ended by Slurm",
    JobEndReason.FORGOTTEN: "the Slurm controller forgot its start",
}


def not_bitwise(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the warning of a start in another environment."""
    return f"not bitwise from here: {_changed(changes)}"


def _changed(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changes.items())


def _description(event: Event) -> str:
    match event:
        case TrainingBegan(step=step, changes=changes):
            which = "the local checkpoints of " if event.local else ""
            began = f"resumed from {which}step {step}" if step else "started"
            began += f" on {counted(event.world_size, 'rank')}"
            return f"{began}; {not_bitwise(changes)}" if changes else began
        case TrainingEnded(outcome=Outcome.STOPPED):
            return f"stopped on request after step {event.step} and saved a checkpoint"
        case TrainingEnded(outcome=outcome):
            phase = " a phase" if outcome is Outcome.PHASE_FINISHED else ""
            return f"finished{phase} after step {event.step}"
        case SettingsChanged(changes=changes):
            return f"settings changed after step {event.step}: {_changed(changes)}"
        case OutOfMemory(rank=rank, micro_batch_lanes=lanes):
            lacking = f"rank {rank} ran out of memory with {lanes} lanes per forward pass"
            return f"{lacking}; the next start halves them"
        case Published(destination=destination):
            return f"saved the checkpoint of step {event.step} ({destination.value})"
        case ResumeFrom(step=None):
            return "the step that a user asked for was refused"
        case ResumeFrom(step=step):
            return f"a user asked to resume from {f'step {step}' if step else 'the beginning'}"
        case Forecast():
            return f"its loss is forecast by {event.file} (sha256 {event.sha256[:12]})"
        case Requested():
            return f"a user asked the run to {event.request}"
        case Mirrored(step=step, url=url, problem=problem):
            where = f"not in {url}: {problem}" if problem else f"in {url}"
            return f"the checkpoint of step {step} is {where}"
        case Restored():
            return f"restored the checkpoint of step {event.step} from {event.url}"
        case Branched():
            return f"branched from step {event.step} of {event.origin}"
        case Slowdown(rank=rank, ratio=ratio):
            who = "the ranks" if rank is None else f"rank {rank}"
            if ratio is None:
                return f"{who} stood still for {event.seconds:.0f} s"
            return f"{who} took {ratio:.1f} times as long as the others"
        case Rewind(spike=spike, segments=(start, stop)):
            skipped = f"skipping segments {start} to {stop - 1} of every lane"
            return f"{spike}: rewound to step {event.to_step}, {skipped}"
        case GaveUp():
            return f"gave up: {event.spike}"
        case UnresolvedSpike(before=before):
            saved = "no checkpoint" if before is None else f"the checkpoint of step {before}"
            return f"ended while {event.spike}; {saved} is from before"
        case AttemptEnded(attempt_number=number):
            return f"attempt {number} ended: {event.cause}; next: {_words(event.next)}"
        case Interrupted(step=step):
            how = "Ctrl-C" if event.signal == "SIGINT" else event.signal
            saved = f"the latest checkpoint is of step {step}" if step else "nothing is saved"
            return f"stopped by {how}; {saved}"
        case Submitted():
            return f"submitted to Slurm as job {event.job}"
        case Canceled():
            return f"canceled (job {event.job})"
        case JobStarted():
            return f"job {event.job} started on {' '.join(event.nodes)}"
        case JobEnded():
            then = "; requeued" if event.requeued else "; not requeued" if event.is_final else ""
            return f"job {event.job} ended: {event.cause}{then}"
        case NodeReplaced(spare=spare):
            cause = _REPLACEMENT_CAUSES[event.reason].format(event.node)
            return f"{cause}; spare node {spare} used"
        case NodesUnready():
            return f"waiting: {event.cause}"
        case SupervisorKilled():
            return f"the supervisor of job {event.job} was killed and started again"
        case _:
            raise AssertionError(event)


def _words(value: Enum) -> str:
    return value.value.replace("_", " ")
