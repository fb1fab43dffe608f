"""The end of the surrounding Slurm job: why it ends, the ledger entry, and whether to requeue it.

Slurm requeues a job by itself after a node failure or a preemption with requeue. After a time
limit, or a request to stop, the supervisor does it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.errors import EXIT_USER_ERROR, ConfigError, UserError, os_error_text
from foundation.files import end_of
from launcher.restart_policy import StartAgain
from launcher.slurm.client import Slurm, node_names, own_job
from launcher.slurm.former_starts import (
    attempts_without_progress,
    refusal_of_futile_starts,
    starts_without_progress,
)
from launcher.slurm.sbatch import Snapshot
from launcher.slurm.srun import failed_nodes
from launcher.stop_signals import StopSignals
from pretrain.checkpoint.storage_retry import CLOCK, Clock
from pretrain.checkpoint.verify import latest_step
from pretrain.config.cluster import load_cluster, time_limit_seconds
from pretrain.rundir.attempt_files import list_attempts
from pretrain.rundir.events import Event, JobEnded, JobEndReason
from pretrain.rundir.exit_statuses import EXIT_STOPPED
from pretrain.rundir.history import find_events
from pretrain.rundir.ledger import in_order
from pretrain.rundir.lock import Fence
from pretrain.rundir.run_dir import RunDir

# Slurm writes this into the job's log and into the logs of its steps when it ends them; after
# `scancel` without a reason.
_NOTICE = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO (.+?))? \*\*\*")
_REASONS = {
    "NODE FAILURE": JobEndReason.NODE_FAILED,
    "PREEMPTION": JobEndReason.PREEMPTED,
    "JOB REQUEUE": JobEndReason.REQUEUED_BY_USER,
    "TIME LIMIT": JobEndReason.TIME_LIMIT,
}
_COUNTED = (JobEndReason.SUPERVISOR_FAILED, JobEndReason.NO_STEPS)  # without progress
_EXCLUDED = (JobEndReason.NODE_EXCLUDED, JobEndReason.NOT_STARTED)  # the job leaves nodes
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "RESIZING", "SIGNALING")
# srun may name the node after slurmstepd has said that one failed; Slurm kills seconds later.
NODE_NAME_SECONDS = 1.0
_RECORD_AGAIN_SECONDS = 1.0  # after which a ledger that could not be written is tried once more
_UNKNOWN_SECONDS = 600.0  # after which Slurm has ended what its controller does not know
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ThisJob:
    """The Slurm job, or task of an array, that this process is the batch script of."""

    id: str  # 17, or 17_3
    number: int  # a task of an array has its own number too
    restart: int
    nodes: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> ThisJob:
        return cls(
            id=own_job(),
            number=int(os.environ["SLURM_JOB_ID"]),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            nodes=tuple(node_names(os.environ["SLURM_JOB_NODELIST"])),
        )


@dataclass(frozen=True)
class JobEnding:
    """Why a start of a job ends.

    `requeue`: the supervisor has to requeue it. `is_final`: it would have to, but the job may not
    be requeued.
    """

    reason: JobEndReason
    requeue: bool
    is_immediate: bool = False  # Slurm is ending the job: there is no time to wait for the ranks
    node: str | None = None
    is_final: bool = False


def is_of_start(job: Mapping[str, str], restart: int, began: str = "") -> bool:
    """Return whether the fields of `scontrol show job` describe the start number `restart` of a
    job, which began at this time, where that is known.

    Else Slurm has requeued the job, or its controller has lost the last seconds before it was
    killed: then the job waits to start with the same number again, has done so, or is unknown.
    """
    is_started = job.get("Restarts") == str(restart) and job.get("JobState") != "PENDING"
    return is_started and began in ("", job.get("StartTime"))


def is_allocated(job: Mapping[str, str], restart: int, began: str = "") -> bool:
    """Return whether this start of the job has its nodes, and Slurm is not about to take them."""
    runs = job.get("JobState") in _RUNNING and not _is_preempted(job)
    return runs and is_of_start(job, restart, began)


def job_ending(
    job: Mapping[str, str], restart: int, log: str, was_warned: bool = False, began: str = ""
) -> JobEnding:
    """Return why the job's start number `restart`, which has to stop, ends.

    `job` has the fields of `scontrol show job`, `log` what Slurm wrote into the job's log.
    `was_warned`: the signal ahead of the time limit has come.
    """
    if not is_of_start(job, restart, began):
        if int(job.get("Restarts", "0")) <= restart:
            return JobEnding(JobEndReason.FORGOTTEN, requeue=False)
        reason = _announced(log)
        if job.get("Reason", "").startswith("launch_failed"):
            reason = JobEndReason.PROLOG_FAILED
        nodes = failed_nodes(log) if reason is JobEndReason.NODE_FAILED else []
        return JobEnding(reason, requeue=False, node=nodes[-1] if nodes else None)
    reason, is_immediate = _reason(job, log, was_warned)
    continues = reason is not JobEndReason.CANCELED
    may_requeue = job.get("Requeue") != "0"
    return JobEnding(
        reason,
        requeue=continues and may_requeue,
        is_immediate=is_immediate,
        is_final=continues and not may_requeue,
    )


def _reason(job: Mapping[str, str], log: str, was_warned: bool) -> tuple[JobEndReason, bool]:
    """Return why Slurm or a person ends the job, and whether at once."""
    is_ending = job.get("JobState") not in _RUNNING
    # It may have been canceled in the grace time of a preemption.
    was_canceled = is_ending and _NOTICE.findall(log)[-1:] == [""]
    if _is_preempted(job) and not was_canceled:
        return JobEndReason.PREEMPTED, is_ending  # without a grace time it is COMPLETING already
    if job.get("Reason") == "TimeLimit":
        return JobEndReason.TIME_LIMIT, True
    if is_ending:
        return JobEndReason.CANCELED, True
    return (JobEndReason.TIME_LIMIT_NEAR if was_warned else JobEndReason.STOP_REQUESTED), False


def _is_preempted(job: Mapping[str, str]) -> bool:
    return job.get("PreemptTime", "None") not in ("None", "")


def _announced(log: str) -> JobEndReason:
    notices = _NOTICE.findall(log)
    last = notices[-1] if notices else ""
    reasons = (reason for prefix, reason in _REASONS.items() if last.startswith(prefix))
    return next(reasons, JobEndReason.ENDED_BY_SLURM)


def excluded_nodes(ledger: Sequence[Event], job: str) -> list[str]:
    """Return the nodes that this job was requeued without."""
    ends = [end for end in find_events(ledger, JobEnded) if end.job == job and end.node]
    return [node for end in ends if end.reason in _EXCLUDED for node in node_names(end.node or "")]


class JobExit:
    """Claims the run for attempts of this start of the job, asks the controller about it, writes
    why it ends, once, and requeues it where that is left to the supervisor.

    After `most_futile` starts in a row that gained nothing the job is not requeued. An end that
    storage does not take is only logged: what matters is that the job is requeued in time.
    """

    def __init__(
        self,
        job: ThisJob,
        run_dir: Path,
        stop: StopSignals,
        most_futile: int,
        slurm: Slurm | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._job, self._slurm, self._clock = job, slurm or Slurm(), clock
        self._run_dir = RunDir(run_dir)  # each write is tried once
        self._stop = stop
        self._fence: Fence | None = None  # of the last attempt
        self._most_futile = most_futile
        self._time_limit = "unknown"
        self.began = ""  # when Slurm started this start of the job
        self._step_before = 0  # of the latest checkpoint when this process began
        with contextlib.suppress(OSError):
            self._step_before = latest_step(self._run_dir.checkpoints)
        self._num_seen = 0
        self._is_written = False
        self.has_given_up = False

    def claim(self, attempt: int) -> str:
        """Claim the run for this attempt, and return its token. Ranks of earlier attempts, which
        may run on a node that was cut off, cannot write any more."""
        self._check_fence()
        token = f"{self._job.id}.{self._job.restart}.{attempt}.{secrets.token_hex(2)}"
        fence = Fence(self._run_dir.path, token)
        fence.claim()
        self._fence = fence
        return token

    def _check_fence(self) -> None:
        """Raise StaleAttempt if Slurm has restarted the job elsewhere: this start may not write."""
        if self._fence is not None:
            with contextlib.suppress(OSError):  # storage that is away tells of no newer attempt
                self._fence.check()

    def is_allocated(self) -> bool:
        """Return whether an attempt may start, and one that failed counts: without its nodes, and
        in the grace time of a preemption, none can succeed."""
        fields = self._fields()
        answer = is_allocated(fields, self._job.restart, self.began)
        if answer:
            self.began = fields.get("StartTime", "")
        return answer

    def poll(self) -> None:
        """Call this often: after a cancellation or a time limit, Slurm kills this process within
        seconds, and a newer attempt elsewhere raises StaleAttempt."""
        self._check_fence()
        received = self._stop.received[self._num_seen :]
        self._num_seen += len(received)
        if signal.SIGTERM in received and not self._is_written:
            ending = self._ending()
            if ending.is_immediate or not ending.requeue:
                self._end(ending)

    def finish(self, status: int) -> None:
        """End this start after its last attempt; `status` is the supervisor's exit status."""
        if self._is_written:
            return
        if status == EXIT_STOPPED:
            self._end(self._ending())
        else:
            reason = JobEndReason.GAVE_UP if status else JobEndReason.FINISHED
            self._end(JobEnding(reason, requeue=False))

    def complete(self, ended: JobEnded) -> int:
        """Requeue if a killed supervisor of this start wrote so; return the exit status."""
        self._is_written = True
        if ended.requeued:
            self._requeue(ended)
        return 0 if ended.reason is JobEndReason.FINISHED else EXIT_STOPPED

    def give_up(self, message: str) -> None:
        """End this start, and the job: the run cannot continue in it."""
        if not self._is_written:
            self._end(JobEnding(JobEndReason.ERROR, requeue=False), message)

    def leave(self, again: StartAgain, nodes: Sequence[str]) -> None:
        """Requeue the job, because of nodes that failed, or that its next start is to avoid."""
        if not self._is_written:
            node = ",".join(nodes) or None
            self._end(JobEnding(again.reason, requeue=True, node=node), again.message)

    def fail(self, error: Exception) -> int:
        """Requeue the job after an error of the supervisor; return the exit status."""
        if self._is_written:
            return EXIT_STOPPED
        with contextlib.suppress(Exception):  # the error may be one of asking
            if not self.is_allocated():  # Slurm or a person has ended it, which is not to undo
                self._end(self._ending())
                return EXIT_STOPPED
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        message = " ".join(f"{kind}{error}".split())
        event = self._end(JobEnding(JobEndReason.SUPERVISOR_FAILED, requeue=True), message)
        return EXIT_STOPPED if event.requeued or event.is_final else EXIT_USER_ERROR

    def excludable(self, nodes: Sequence[str]) -> list[str]:
        """Return which of the nodes the job can run without: not requested by name, and the
        partition has enough others."""
        fields = self._fields()
        partitions = self._slurm.answered(self._slurm.partitions)
        sizes = {partition.name: partition.num_nodes for partition in partitions}
        left_out = {
            *excluded_nodes(self._run_dir.ledger.read(), self._job.id),
            *node_names(fields.get("ExcNodeList", "")),
        }
        most = sizes.get(fields.get("Partition", ""), 0) - len(left_out) - len(self._job.nodes)
        named = node_names(fields.get("ReqNodeList", ""))
        return [node for node in nodes if node not in named][: max(0, most)]

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that the job has now: some may have been taken from it."""
        return tuple(node_names(self._fields().get("NodeList", ""))) or self._job.nodes

    def _fields(self) -> dict[str, str]:
        return self._slurm.answered(self._slurm.details, self._job.id)

    def _ending(self) -> JobEnding:
        fields = self._fields()
        self._time_limit = fields.get("TimeLimit", self._time_limit)
        job_log = Path(fields.get("StdOut", "/dev/null"))
        was_warned = signal.SIGUSR1 in self._stop.received
        deadline = self._clock.now() + NODE_NAME_SECONDS
        while True:
            log = _said_by_slurm(self._run_dir.logs, job_log)
            ending = job_ending(fields, self._job.restart, log, was_warned, self.began)
            if ending.reason is JobEndReason.PROLOG_FAILED:
                return replace(ending, node=self._drained_by_prolog())
            is_named = ending.reason is not JobEndReason.NODE_FAILED or ending.node
            if is_named or self._clock.now() > deadline:
                return ending
            self._clock.sleep(0.1)

    def _drained_by_prolog(self) -> str | None:
        reasons = self._slurm.answered(self._slurm.node_states, self._job.nodes, "%E")
        return next((node for node in reasons if reasons[node].startswith("Prolog error")), None)

    def _end(self, ending: JobEnding, message: str = "") -> JobEnded:
        self._is_written = True
        self._check_fence()
        with contextlib.suppress(OSError):  # Slurm starts no job that cannot write its log
            self._run_dir.logs.mkdir(exist_ok=True)
        event = JobEnded(
            job=self._job.id,
            restart=self._job.restart,
            reason=ending.reason,
            requeued=ending.requeue,
            node=ending.node,
            message=message,
            is_final=ending.is_final,
            step_before=self._step_before,
        )
        event = self._recorded(event)
        self.has_given_up = event.reason is JobEndReason.ERROR  # also instead of a requeue
        needs_resume = event.is_final or event.reason is JobEndReason.CANCELED
        advice = f"; 'launcher resume {self._run_dir.path}' continues the run"
        _log.info("%s%s", event.description, advice if needs_resume else "")
        if event.reason is JobEndReason.FORGOTTEN:
            # Slurm kills it when the node registers. If it exited before, the node would refuse the
            # job's next start as a duplicate, and be drained.
            self._clock.sleep(_UNKNOWN_SECONDS)
        return self._requeue(event) if event.requeued else event

    def _recorded(self, event: JobEnded) -> JobEnded:
        """Return the end as it is in the ledger, if that can be written."""
        for is_last in (False, True):
            try:
                event = self._weighed(replace(event, step=latest_step(self._run_dir.checkpoints)))
                self._run_dir.ledger.append(event)
                break
            except OSError as error:
                if is_last:  # the next start notes an end that is not there
                    _log.error("the job's end is not in the ledger: %s", os_error_text(error))
                else:
                    self._clock.sleep(_RECORD_AGAIN_SECONDS)
        return event

    def _weighed(self, event: JobEnded) -> JobEnded:
        """Return the end, without its requeue if the last starts brought no progress."""
        now = time.time()
        events, _ = in_order([*self._run_dir.ledger.read(), replace(event, time=now)], now)
        refusal = refusal_of_futile_starts(
            events, self._job.id, self._most_futile, self._time_limit, self._shortened_from()
        )
        count = 0
        if event.reason in _COUNTED:
            count = attempts_without_progress(events, self._job.id)
        elif event.reason is JobEndReason.NOT_STARTED:
            count = starts_without_progress(events, self._job.id)
        if count >= self._most_futile:
            refusal = f"{event.cause}; {count} times in a row without progress"
        if event.requeued and refusal:
            return replace(event, reason=JobEndReason.ERROR, requeued=False, message=refusal)
        return event

    def _shortened_from(self) -> str:
        """Return the time limit of the cluster file if this job's is shorter, or ''."""
        try:
            usual = load_cluster(Snapshot(self._run_dir.path).cluster).time_limit
            return usual if time_limit_seconds(self._time_limit) < time_limit_seconds(usual) else ""
        except (ConfigError, OSError, ValueError):
            return ""

    def _requeue(self, event: JobEnded) -> JobEnded:
        """Requeue the job, as its recorded end says; another end if that cannot be done, or if a
        person has canceled the job by now, such as while Slurm did not respond."""
        ends: list[Event] = [event]  # which may not be in the ledger
        with contextlib.suppress(OSError):
            ends = [*self._run_dir.ledger.read(), event]
        exclude = list(dict.fromkeys(excluded_nodes(ends, self._job.id)))

        def requeue() -> bool:
            if self._ending().reason is JobEndReason.CANCELED:
                return False
            self._slurm.requeue(self._job.id, self._job.restart, exclude)
            return True

        try:
            if self._slurm.answered(requeue):
                return event
            other = replace(event, reason=JobEndReason.CANCELED, requeued=False)
        except UserError as error:
            _log.error("%s", error)
            other = replace(event, requeued=False, is_final=True)
        return self._recorded(other)


def _said_by_slurm(logs: Path, job_log: Path) -> str:
    """Return the ends of the last attempt's and the job's log; '' while storage is away."""
    with contextlib.suppress(OSError):
        srun_logs = [attempt.srun_log for attempt in list_attempts(logs)[-1:]]
        return "".join(map(end_of, [*srun_logs, job_log]))
    return ""
