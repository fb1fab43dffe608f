"""What can happen to a run, as data: the events of supervisors, Slurm jobs and commands.
Torch-free.

`training_events.py` has those of the ranks. Reasons and next actions are enums; `cause` and
`description` render them for people and are never parsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pretrain.rundir.exit_status import EXIT_STOPPED, describe_exit
from pretrain.rundir.training_events import Event


class NextAction(Enum):
    """What follows an attempt."""

    FINISHED = "finished"
    STOPPED = "stopped"  # on request, after a checkpoint or before the first step
    REFUSED = "refused"  # a setting or a file is wrong, so another attempt would fail the same way
    RETRY = "retry"
    GIVE_UP = "give_up"


class AttemptReason(Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    STOP_REQUESTED = "stop_requested"
    USER_ERROR = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"
    RANK_FAILED = "rank_failed"
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
    FIRST_NODE_LOST = "first_node_lost"  # and the supervisor with it: the next start writes this
    STORAGE_FAILED = "storage_failed"  # so its end could not be written: the next start does
    NODE_EXCLUDED = "node_excluded"  # requeued to start without this node
    PROLOG_FAILED = "prolog_failed"  # Slurm has drained the node and holds the job
    ENDED_BY_SLURM = "ended_by_slurm"
    FORGOTTEN = "forgotten"  # by the controller, which may start it with the same restart number


class ReplacedBecause(Enum):
    """Why a node of a job trains no more."""

    NODE_FAILED = "node_failed"
    NOT_RESPONDING = "not_responding"
    RANKS_FAILED = "ranks_failed"
    RUN_DIRECTORY_UNSEEN = "run_directory_unseen"


# How a job ended when nothing interrupted the run, or when other events say what did.
UNEVENTFUL = (JobEndReason.FINISHED, JobEndReason.GAVE_UP, JobEndReason.CANCELED)
# Interruptions that belong to sharing a cluster; every other one is a failure.
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
        if self.next is not NextAction.GIVE_UP:
            return self._cause
        count = self.without_progress
        times = "attempt" if count == 1 else f"{count} attempts in a row"
        return f"{self._cause}; {times} brought no checkpoint beyond step {self.step}"

    @property
    def description(self) -> str:
        following = self.next.value.replace("_", " ")
        return f"attempt {self.attempt_number} ended: {self.cause}; next: {following}"

    @property
    def _cause(self) -> str:
        if self.reason is AttemptReason.HANG:
            rank = self.first_failure
            return "the ranks hung" + ("" if rank is None else f"; rank {rank} was unresponsive")
        if self.reason is AttemptReason.RANK_FAILED:
            rank = self.first_failure
            if rank is None:
                rank = next(
                    i for i, each in enumerate(self.statuses) if each not in (0, EXIT_STOPPED)
                )
            return f"rank {rank} {describe_exit(self.statuses[rank])}"
        return _ATTEMPT_CAUSES[self.reason]


_ATTEMPT_CAUSES = {
    AttemptReason.FINISHED: "every rank finished",
    AttemptReason.STOP_REQUESTED: "stopped on request",
    AttemptReason.USER_ERROR: "a setting or a file has to change first",
    AttemptReason.OUT_OF_MEMORY: "out of memory; continuing with half the lanes per forward pass",
    AttemptReason.UNSAVED: "no checkpoint holds the last step",
}


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """The program that runs the ranks was asked to end, and no rank was left to save for it."""

    signal: str  # its name
    step: int  # of the latest checkpoint

    @property
    def description(self) -> str:
        how = "Ctrl-C" if self.signal == "SIGINT" else self.signal
        saved = f"the latest checkpoint is of step {self.step}" if self.step else "nothing is saved"
        return f"stopped by {how}; {saved}"


@dataclass(frozen=True, kw_only=True)
class Submitted(Event):
    job: str  # 17, or 17_3 for a task of an array
    job_name: str = ""

    @property
    def description(self) -> str:
        return f"submitted to Slurm as job {self.job}"


@dataclass(frozen=True, kw_only=True)
class Canceled(Event):
    job: str
    step: int = 0

    @property
    def description(self) -> str:
        return f"canceled (job {self.job})"


@dataclass(frozen=True, kw_only=True)
class JobStarted(Event):
    """The supervisor of a job's start number `restart` runs."""

    job: str
    restart: int
    nodes: tuple[str, ...]
    step: int  # of the latest checkpoint

    @property
    def description(self) -> str:
        return f"job {self.job} started on {' '.join(self.nodes)}"


@dataclass(frozen=True, kw_only=True)
class JobEnded(Event):
    """A start of a job ended. Missing if its first node was lost; then the next start writes it."""

    job: str
    restart: int
    reason: JobEndReason
    requeued: bool  # by the supervisor; Slurm may requeue a job too
    node: str | None = None  # that failed, or is excluded
    other_job: str | None = None  # that has the run
    message: str = ""
    is_final: bool = False  # Slurm does not requeue it: 'launcher resume' continues the run
    step: int | None = None  # of the latest checkpoint
    step_before: int | None = None  # when a start began whose end the next one writes

    @property
    def cause(self) -> str:
        """Why it ended."""
        if self.reason is JobEndReason.ERROR:
            return self.message
        if self.reason is JobEndReason.NODE_FAILED:
            return f"node {self.node} failed" if self.node else "a node failed"
        if self.reason is JobEndReason.PROLOG_FAILED:
            return f"the prolog failed on {f'node {self.node}' if self.node else 'a node'}"
        if self.reason is JobEndReason.NODE_EXCLUDED:
            return f"ranks on node {self.node} failed twice in a row"
        if self.reason is JobEndReason.RUN_IN_USE:
            return f"job {self.other_job} has the run"
        return _JOB_CAUSES.get(self.reason, self.reason.value.replace("_", " "))

    @property
    def description(self) -> str:
        then = "; requeued" if self.requeued else "; not requeued" if self.is_final else ""
        return f"job {self.job} ended: {self.cause}{then}"


@dataclass(frozen=True, kw_only=True)
class NodeReplaced(Event):
    """The next attempts of this start of the job use a spare node instead of one of theirs."""

    job: str
    node: str
    spare: str
    reason: ReplacedBecause

    @property
    def description(self) -> str:
        return f"{_REPLACEMENT_CAUSES[self.reason].format(self.node)}; spare node {self.spare} used"


@dataclass(frozen=True, kw_only=True)
class SupervisorKilled(Event):
    """The supervisor of a job's start was killed. Its successor in that start writes this."""

    job: str
    restart: int
    step_before: int  # of the latest checkpoint when the killed one began
    step: int  # of the latest checkpoint now

    @property
    def cause(self) -> str:
        return "its supervisor was killed"

    @property
    def description(self) -> str:
        return f"the supervisor of job {self.job} was killed and started again"


_REPLACEMENT_CAUSES = {
    ReplacedBecause.NODE_FAILED: "node {} failed",
    ReplacedBecause.NOT_RESPONDING: "node {} is drained or does not respond",
    ReplacedBecause.RANKS_FAILED: "ranks on node {} failed twice in a row",
    ReplacedBecause.RUN_DIRECTORY_UNSEEN: "node {} does not see the run directory",
}
_JOB_CAUSES = {
    JobEndReason.GAVE_UP: "the supervisor gave up",
    JobEndReason.STOP_REQUESTED: "asked to stop",
    JobEndReason.REQUEUED_BY_USER: "requeued by a user, or by Slurm",
    JobEndReason.FIRST_NODE_LOST: "its first node was lost",
    JobEndReason.STORAGE_FAILED: "ended while storage failed",
    JobEndReason.ENDED_BY_SLURM: "ended by Slurm",
    JobEndReason.FORGOTTEN: "the Slurm controller forgot its start",
}
