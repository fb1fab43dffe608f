"""How a start of the surrounding Slurm job ends: the reason, the ledger entry, the requeue.

After a node failure or a preemption with requeue, Slurm itself requeues the job. After a time limit
or a request to stop the supervisor has to.
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

# The line that Slurm writes into the logs of a job and its steps when it ends them. After `scancel`
# it has no reason.
_NOTICE = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO (.+?))? \*\*\*")
_REASONS = {
    "NODE FAILURE": JobEndReason.NODE_FAILED,
    "PREEMPTION": JobEndReason.PREEMPTED,
    "JOB REQUEUE": JobEndReason.REQUEUED_BY_USER,
    "TIME LIMIT": JobEndReason.TIME_LIMIT,
}
# Ends that count as attempts without progress, because no attempt of the start recorded an end.
_COUNTED = (JobEndReason.SUPERVISOR_FAILED, JobEndReason.NO_STEPS)
_NOT_REQUEUED = (JobEndReason.CANCELED, JobEndReason.FORGOTTEN)
_EXCLUDING = (JobEndReason.NODE_EXCLUDED, JobEndReason.NOT_STARTED)  # next starts avoid the `node`
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "RESIZING", "SIGNALING")
# How long to wait for srun to name the failed node. Slurm's notice of the failure comes first, and
# a few seconds after the notice Slurm kills this process.
NODE_NAME_SECONDS = 1.0
_RECORD_AGAIN_SECONDS = 1.0  # before a second try to write the ledger
_UNKNOWN_SECONDS = 600.0  # in this time Slurm kills a job that its controller does not know
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ThisJob:
    """The Slurm job, or task of an array, whose batch script is this process."""

    id: str  # 17, or 17_3
    number: int  # SLURM_JOB_ID, which for a task of an array differs from `id`
    restart: int  # how often Slurm has requeued the job
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

    `requeue`: the supervisor has to requeue the job. `is_final`: the run needs another start, but
    the job may not be requeued.
    """

    reason: JobEndReason
    requeue: bool
    is_immediate: bool = False  # Slurm is ending the job: there is no time to wait for the ranks
    node: str | None = None
    is_final: bool = False


def is_of_start(job: Mapping[str, str], restart: int, began: str = "") -> bool:
    """Return whether the fields of `scontrol show job` describe start number `restart` of the job.

    `began` is the time of that start, '' if unknown. If False, Slurm has requeued the job, or its
    controller was killed and has lost the last seconds: then it does not know the job, or starts it
    once more under the same number.
    """
    is_started = job.get("Restarts") == str(restart) and job.get("JobState") != "PENDING"
    return is_started and began in ("", job.get("StartTime"))


def is_allocated(job: Mapping[str, str], restart: int, began: str = "") -> bool:
    """Return whether this start has its nodes, and Slurm is not about to take them away."""
    runs = job.get("JobState") in _RUNNING and not _is_preempted(job)
    return runs and is_of_start(job, restart, began)


def job_ending(
    job: Mapping[str, str], restart: int, log: str, was_warned: bool = False, began: str = ""
) -> JobEnding:
    """Return why start number `restart` of the job ends, after a signal to stop.

    `job` has the fields of `scontrol show job`; `log` has what Slurm wrote into the job's log.
    `was_warned`: Slurm has sent the signal that announces the time limit.
    """
    if not is_of_start(job, restart, began):
        if int(job.get("Restarts", "0")) <= restart:
            return JobEnding(JobEndReason.FORGOTTEN, requeue=False)
        reason = _announced_reason(log)
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
    """Return why Slurm or a person ends the job, and whether Slurm is killing it already."""
    is_ending = job.get("JobState") not in _RUNNING
    # A job in the grace time of a preemption may be canceled as well: then the last notice has no
    # reason.
    was_canceled = is_ending and _NOTICE.findall(log)[-1:] == [""]
    if _is_preempted(job) and not was_canceled:
        return JobEndReason.PREEMPTED, is_ending  # without a grace time Slurm kills it at once
    if job.get("Reason") == "TimeLimit":
        return JobEndReason.TIME_LIMIT, True
    if is_ending:
        return JobEndReason.CANCELED, True
    return (JobEndReason.TIME_LIMIT_NEAR if was_warned else JobEndReason.STOP_REQUESTED), False


def _is_preempted(job: Mapping[str, str]) -> bool:
    return job.get("PreemptTime", "None") not in ("None", "")


def _announced_reason(log: str) -> JobEndReason:
    notices = _NOTICE.findall(log)
    last = notices[-1] if notices else ""
    reasons = (reason for prefix, reason in _REASONS.items() if last.startswith(prefix))
    return next(reasons, JobEndReason.ENDED_BY_SLURM)


def excluded_nodes(ledger: Sequence[Event], job: str) -> list[str]:
    """Return the nodes that earlier starts excluded from this job."""
    ends = [end for end in find_events(ledger, JobEnded) if end.job == job and end.node]
    return [node for end in ends if end.reason in _EXCLUDING for node in node_names(end.node or "")]


class JobExit:
    """Records the end of this start of the job, once, and requeues the job if Slurm does not.

    It also claims the run for the attempts, and asks Slurm's controller about the job. After
    `most_futile` starts in a row without progress the job is not requeued. If storage fails, the
    end is only logged, because the job must be requeued before Slurm kills this process.
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
        self._fence: Fence | None = None  # the latest attempt's
        self._most_futile = most_futile
        self._time_limit = "unknown"
        self.began = ""  # when Slurm started this start of the job
        self._step_before = 0  # step of the latest checkpoint at this process's start
        with contextlib.suppress(OSError):
            self._step_before = latest_step(self._run_dir.checkpoints)
        self._num_seen = 0
        self._is_written = False
        self.has_given_up = False

    def claim(self, attempt: int) -> str:
        """Claim the run for this attempt and return its token.

        From now on ranks of earlier attempts, for example on a node that was cut off, cannot write.
        """
        self._check_fence()
        token = f"{self._job.id}.{self._job.restart}.{attempt}.{secrets.token_hex(2)}"
        fence = Fence(self._run_dir.path, token)
        fence.claim()
        self._fence = fence
        return token

    def _check_fence(self) -> None:
        """Raise StaleAttempt if Slurm has restarted the job elsewhere: this start may not write."""
        if self._fence is not None:
            with contextlib.suppress(OSError):  # storage is away: a newer attempt cannot be seen
                self._fence.check()

    def is_allocated(self) -> bool:
        """Return whether the job has its nodes and keeps them; False while Slurm preempts it.

        If False, no attempt can succeed: callers start none, and do not count one that failed.
        """
        fields = self._fields()
        answer = is_allocated(fields, self._job.restart, self.began)
        if answer:
            self.began = fields.get("StartTime", "")
        return answer

    def poll(self) -> None:
        """Record the end of the job if Slurm is about to kill this process. To be called often.

        Raises StaleAttempt if a newer attempt runs elsewhere.
        """
        self._check_fence()
        received = self._stop.received[self._num_seen :]
        self._num_seen += len(received)
        if signal.SIGTERM in received and not self._is_written:
            ending = self._ending()
            # Otherwise wait until the ranks have saved and stopped (`end_after_attempts`).
            if ending.is_immediate or not ending.requeue:
                self._end(ending)

    def end_after_attempts(self, status: int) -> None:
        """End this start after its last attempt; `status` is the supervisor's exit status."""
        if self._is_written:
            return
        if status == EXIT_STOPPED:
            self._end(self._ending())
        else:
            reason = JobEndReason.GAVE_UP if status else JobEndReason.FINISHED
            self._end(JobEnding(reason, requeue=False))

    def end_as_recorded(self, ended: JobEnded) -> int:
        """Carry out the end that a killed supervisor has recorded; return the exit status."""
        self._is_written = True
        if ended.requeued:
            self._requeue(ended)
        return 0 if ended.reason is JobEndReason.FINISHED else EXIT_STOPPED

    def end_with_error(self, message: str) -> None:
        """End the job without a requeue: another attempt would fail in the same way."""
        if not self._is_written:
            self._end(JobEnding(JobEndReason.ERROR, requeue=False), message)

    def end_to_start_again(self, again: StartAgain, nodes: Sequence[str]) -> None:
        """Requeue the job; its next start runs without `nodes`, which failed or are unusable."""
        if not self._is_written:
            node = ",".join(nodes) or None
            self._end(JobEnding(again.reason, requeue=True, node=node), again.message)

    def end_after_error(self, error: Exception) -> int:
        """Requeue the job after an error of the supervisor; return the exit status."""
        if self._is_written:
            return EXIT_STOPPED
        with contextlib.suppress(Exception):  # the error may have come from asking Slurm
            # If Slurm or a person has ended the job, a requeue would start it again.
            if not self.is_allocated():
                self._end(self._ending())
                return EXIT_STOPPED
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        message = " ".join(f"{kind}{error}".split())
        self._end(JobEnding(JobEndReason.SUPERVISOR_FAILED, requeue=True), message)
        return EXIT_USER_ERROR if self.has_given_up else EXIT_STOPPED

    def excludable(self, nodes: Sequence[str]) -> list[str]:
        """Return which of the nodes the job can exclude.

        A node that was requested by name cannot be excluded. The nodes that remain in the partition
        must be enough for the job.
        """
        fields = self._fields()
        partitions = self._slurm.answered(self._slurm.partitions)
        sizes = {partition.name: partition.num_nodes for partition in partitions}
        excluded = {
            *excluded_nodes(self._run_dir.ledger.read(), self._job.id),
            *node_names(fields.get("ExcNodeList", "")),
        }
        most = sizes.get(fields.get("Partition", ""), 0) - len(excluded) - len(self._job.nodes)
        named = node_names(fields.get("ReqNodeList", ""))
        return [node for node in nodes if node not in named][: max(0, most)]

    def nodes(self) -> tuple[str, ...]:
        """Return the job's present nodes: Slurm may have taken some away."""
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
            log = _end_of_logs(self._run_dir.logs, job_log)
            ending = job_ending(fields, self._job.restart, log, was_warned, self.began)
            if ending.reason is JobEndReason.PROLOG_FAILED:
                return replace(ending, node=self._drained_by_prolog())
            lacks_name = ending.reason is JobEndReason.NODE_FAILED and not ending.node
            if not lacks_name or self._clock.now() > deadline:
                return ending
            self._clock.sleep(0.1)

    def _drained_by_prolog(self) -> str | None:
        reasons = self._slurm.answered(self._slurm.node_states, self._job.nodes, "%E")
        return next((node for node in reasons if reasons[node].startswith("Prolog error")), None)

    def _end(self, ending: JobEnding, message: str = "") -> None:
        self._is_written = True
        self._check_fence()
        # A user may have removed the directory. Slurm fails a job that cannot write its log there.
        with contextlib.suppress(OSError):
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
        self.has_given_up = event.reason is JobEndReason.ERROR  # set also by `_requeue_limited`
        needs_resume = event.is_final or event.reason is JobEndReason.CANCELED
        advice = f"; 'launcher resume {self._run_dir.path}' continues the run"
        _log.info("%s%s", event.description, advice if needs_resume else "")
        if event.reason is JobEndReason.FORGOTTEN:
            # Slurm kills this process when the node registers with the controller. If it exited
            # earlier, the node would take the job's next start for a duplicate and be drained.
            self._clock.sleep(_UNKNOWN_SECONDS)
        if event.requeued:
            self._requeue(event)

    def _recorded(self, event: JobEnded) -> JobEnded:
        """Write the end into the ledger, if storage works, and return it with its final fields."""
        for is_last in (False, True):
            try:
                event = replace(event, step=latest_step(self._run_dir.checkpoints))
                event = self._requeue_limited(event)
                self._run_dir.ledger.append(event)
                break
            except OSError as error:
                if is_last:  # the next start adds an entry for an end that is missing
                    _log.error("the job's end is not in the ledger: %s", os_error_text(error))
                else:
                    self._clock.sleep(_RECORD_AGAIN_SECONDS)
        return event

    def _requeue_limited(self, event: JobEnded) -> JobEnded:
        """Return the end; as an error without a requeue if the last starts made no progress."""
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

    def _requeue(self, event: JobEnded) -> None:
        """Requeue the job, or record another end.

        That is so if Slurm refuses the requeue, or if meanwhile, for example while it did not
        respond, a person has canceled the job or the controller has forgotten this start.
        """
        ends: list[Event] = [event]  # the ledger may lack it
        with contextlib.suppress(OSError):
            ends = [*self._run_dir.ledger.read(), event]
        exclude = list(dict.fromkeys(excluded_nodes(ends, self._job.id)))

        def requeue() -> bool:
            if self._ending().reason in _NOT_REQUEUED:
                return False
            self._slurm.requeue(self._job.id, self._job.restart, exclude)
            return True

        try:
            if self._slurm.answered(requeue):
                return
        except UserError as error:
            _log.error("%s", error)
        ending = self._ending()  # Slurm refuses, too, because of what has happened meanwhile
        if ending.reason in _NOT_REQUEUED:
            self._end(ending)
        else:
            self._recorded(replace(event, requeued=False, is_final=True))


def _end_of_logs(logs: Path, job_log: Path) -> str:
    """Return the last lines of the latest attempt's and the job's log; '' while storage is away."""
    with contextlib.suppress(OSError):
        srun_logs = [attempt.srun_log for attempt in list_attempts(logs)[-1:]]
        return "".join(map(end_of, [*srun_logs, job_log]))
    return ""
