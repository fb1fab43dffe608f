"""`launcher batch`: the supervisor inside a Slurm job. The batch script that `launcher submit`
writes runs it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from foundation.errors import ConfigError, UserError
from foundation.settings import load_config
from launcher.restart_policy import (
    AttemptResult,
    RestartPolicy,
    add_policy_arguments,
    attempts_without_progress,
    no_rank_started,
    node_to_exclude,
    past_attempts,
    policy_of,
)
from launcher.slurm import client as slurm
from launcher.slurm.job_checks import usable_nodes
from launcher.slurm.job_exit import JobExit, ThisJob
from launcher.slurm.lost_nodes import (
    FirstNodeGuard,
    JobNodes,
    LeaveNode,
    NodePool,
    use_up_old_numbers,
)
from launcher.slurm.snapshot import Snapshot
from launcher.slurm.srun import (
    SlurmRanks,
    Step,
    nodes_that_cannot_start,
    nodes_that_miss,
)
from launcher.stop_signals import HOLDER, StopSignals, StopWhileWaiting
from launcher.supervisor import is_complete, latest_step, supervise
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.costs.cluster import load_cluster
from pretrain.rundir.events import (
    Event,
    JobEnded,
    JobEndReason,
    JobStarted,
    ReplacedBecause,
    SupervisorKilled,
    TrainingBegan,
)
from pretrain.rundir.exit_status import EXIT_STOPPED
from pretrain.rundir.ledger import events_of, job_names, last_of
from pretrain.rundir.lock import Fence, StaleAttempt
from pretrain.rundir.run_dir import RunDir, refuse_foreign_run
from pretrain.terminal.log import add_log_level_argument, set_up_logging
from pretrain.terminal.text import counted

_POLL_SECONDS = 1.0
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher batch`."""
    parser.add_argument("run_dir", type=Path, help="run directory")
    add_policy_arguments(parser)
    parser.add_argument(
        "--spare-nodes", type=int, default=0, metavar="S", help="nodes of the job that only replace"
    )
    add_log_level_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train inside this job.

    After a stop that Slurm announced, the job is requeued unless it was canceled.
    """
    set_up_logging("supervisor", arguments.log_level)
    refuse_foreign_run(arguments.run_dir)  # also a cell's, which others than its array may have
    config = load_config(RunConfig, Snapshot(arguments.run_dir).experiment)
    job, stop = ThisJob.from_environment(), StopSignals()
    policy, path = policy_of(arguments), arguments.run_dir
    with stop:
        fences = AttemptFences(path, f"{job.id}.{job.restart}")
        job_exit = JobExit(
            job, path, stop, fences.check, most_futile=policy.attempts_without_progress
        )
        patience = config.checkpoint.storage_patience_seconds
        run_dir = RunDir(path, stop.patience(patience, job_exit.poll))
        if ended := end_of_start(run_dir.ledger.read(), job):
            return job_exit.complete(ended)
        if is_complete(run_dir, config):  # the job was requeued after its end
            _log.info("%s is done: there is nothing to do", run_dir.path)
            return 0
        status = EXIT_STOPPED
        with contextlib.suppress(StopWhileWaiting):
            if job_exit.is_allocated():
                await_former_ranks(job, run_dir, job_exit.poll)
                begin(job, run_dir)
                use_up_old_numbers(run_dir.ledger.read(), job, job_exit.poll)
                status = _make_attempts(
                    job, run_dir, policy, stop, job_exit, fences, arguments.spare_nodes
                )
        job_exit.finish(status)
    return status


def _make_attempts(
    job: ThisJob,
    run_dir: RunDir,
    policy: RestartPolicy,
    stop: StopSignals,
    job_exit: JobExit,
    fences: AttemptFences,
    num_spare: int,
) -> int:
    """Train as long as this start of the job does; the exit status."""
    past = past_attempts(run_dir.ledger.read(), job.id)
    try:
        refuse_without_progress(past, policy)
        guard = FirstNodeGuard(job, is_needed=num_spare > 0)
        with run_dir.locked(HOLDER, is_fenced=True), guard:
            starter = AttemptStarter(job, num_spare, run_dir, job_exit.can_exclude, fences.claim)

            def meanwhile() -> None:
                job_exit.poll()
                guard.watch()

            return supervise(
                run_dir, starter.start, policy, stop, past, meanwhile, job.id, job_exit.is_allocated
            )
    except StaleAttempt:
        raise  # the ledger belongs to a newer attempt
    except (LeaveNode, UserError) as found:
        if job_exit.is_allocated():  # else it says nothing of the nodes
            if not isinstance(found, LeaveNode):
                job_exit.give_up(str(found))
                raise
            job_exit.leave(found.node, found.reason)
        return EXIT_STOPPED


class AttemptFences:
    """This supervisor's fences, one for each attempt: ranks of earlier attempts cannot write any
    more.

    A node that was cut off from the network may have ranks and a supervisor that still run while
    Slurm has restarted the job elsewhere. Whoever claimed the run last owns it; all others find
    another token and exit without writing.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self._run_dir = run_dir
        self._name = name
        self._fence: Fence | None = None

    def claim(self, number: int) -> str:
        """Claim the run for attempt `number`; returns its token."""
        self.check()
        fence = Fence(self._run_dir, f"{self._name}.{number}.{secrets.token_hex(2)}")
        fence.claim()
        self._fence = fence
        return fence.token

    def check(self) -> None:
        """Raise StaleAttempt if another supervisor has claimed the run since."""
        if self._fence is not None:
            with contextlib.suppress(OSError):  # storage that is away tells of no newer attempt
                self._fence.check()


def await_former_ranks(job: ThisJob, run_dir: RunDir, meanwhile: Callable[[], None]) -> None:
    """Wait until the ranks of a supervisor that was killed in this start of the job have ended.

    Their srun asked them to save and stop when it died (SlurmRanks). Those that do not manage in
    the time that the notice ahead of a time limit would give them are killed.
    """
    lost = open_start(run_dir.ledger.read(), job.id)
    if lost is None or lost.restart != job.restart:
        return
    patience = load_cluster(Snapshot(run_dir.path).cluster).signal_seconds
    deadline = time.monotonic() + patience
    while steps := slurm.retry_unreachable(lambda: slurm.steps(job.number)):
        meanwhile()
        if time.monotonic() > deadline:
            _log.warning("ranks of a killed supervisor still run after %d s: killing", patience)
            for step in steps:
                slurm.cancel(step)
            return  # the step of the next attempt waits for what they hold
        time.sleep(_POLL_SECONDS)


def refuse_without_progress(past: Sequence[AttemptResult], policy: RestartPolicy) -> None:
    """Raise ConfigError if nothing speaks for another attempt: the last ones may have been lost
    together with their supervisors, and then nobody decided what follows."""
    count = attempts_without_progress(past)
    if count >= policy.attempts_without_progress:
        raise ConfigError(
            f"{count} attempts in a row brought no checkpoint beyond step {past[-1].step_after}; "
            "remove the cause, then 'launcher resume'"
        )


def begin(job: ThisJob, run_dir: RunDir) -> None:
    """Record that this job has the run; ConfigError if another live job has it."""
    ledger, step = run_dir.ledger.read(), latest_step(run_dir)
    if lost := open_start(ledger, job.id):
        run_dir.ledger.append(end_of_lost(lost, job, step))
    run_dir.ledger.append(JobStarted(job=job.id, restart=job.restart, nodes=job.nodes, step=step))
    # Each job writes its start before it looks for others, so of two jobs at least one sees the
    # other.
    ledger = run_dir.ledger.read()
    for other in slurm.jobs(other_jobs(ledger, job.id)):
        if other.is_live and other.name in job_names(ledger):
            run_dir.ledger.append(
                JobEnded(
                    job=job.id,
                    restart=job.restart,
                    reason=JobEndReason.RUN_IN_USE,
                    requeued=False,
                    other_job=other.id,
                )
            )
            raise ConfigError(
                f"job {other.id} ({other.state.lower()}) has the run {run_dir.path}; "
                f"job {job.id} exits: wait for the other one, or end it first: scancel {other.id}"
            )


def end_of_lost(lost: JobStarted, job: ThisJob, step: int) -> JobEnded | SupervisorKilled:
    """What `job` writes about a start whose supervisor could not: killed if it is this very start,
    else lost with the node."""
    if lost.restart == job.restart:
        return SupervisorKilled(job=job.id, restart=job.restart, step_before=lost.step, step=step)
    return JobEnded(
        job=job.id,
        restart=lost.restart,
        reason=JobEndReason.FIRST_NODE_LOST,
        requeued=True,
        step_before=lost.step,
        step=step,
    )


def end_of_start(ledger: Sequence[Event], job: ThisJob) -> JobEnded | None:
    """How this very start of the job ended, if a supervisor wrote that before it was killed.

    One that the controller forgot was another start, which may have had the same number.
    """
    last = last_of([end for end in events_of(ledger, JobEnded) if end.job == job.id], JobEnded)
    is_own = last and last.restart == job.restart and last.reason is not JobEndReason.FORGOTTEN
    return last if is_own else None


def open_start(ledger: Sequence[Event], job: str) -> JobStarted | None:
    """The last start of this job, if nothing was written about its end."""
    last = last_of([e for e in ledger if getattr(e, "job", "") == job], JobStarted, JobEnded)
    return last if isinstance(last, JobStarted) else None


def other_jobs(ledger: Sequence[Event], job: str) -> list[str]:
    """Other jobs that started before this one and whose end nothing was written about, latest
    first."""
    open_jobs: dict[str, None] = {}
    for event in ledger:
        if isinstance(event, JobStarted):
            if event.job == job:
                break
            open_jobs[event.job] = None
        elif isinstance(event, JobEnded) and not event.requeued:
            open_jobs.pop(event.job, None)
    return list(reversed(open_jobs))


class AttemptStarter:
    """Starts attempts; before each it replaces nodes that failed by spare ones.

    `can_exclude`: whether the job could start without a node; `claim`: claims the run for an
    attempt and returns its token.
    """

    def __init__(
        self,
        job: ThisJob,
        num_spare: int,
        run_dir: RunDir,
        can_exclude: Callable[[str], bool],
        claim: Callable[[int], str],
    ) -> None:
        self._job, self._run_dir = job, run_dir
        self._claim = claim
        snapshot = Snapshot(run_dir.path)
        self._cluster = load_cluster(snapshot.cluster)
        config = load_config(RunConfig, snapshot.experiment)
        nodes = first_nodes(config, self._cluster.tasks_per_node, job.nodes, num_spare)
        self._pool = NodePool(job, nodes, run_dir.ledger, num_spare > 0, can_exclude)
        self._ranks: SlurmRanks | None = None  # of the last attempt
        self._pool.replace_failed()
        self._step = self._checked_step()

    def start(self, number: int) -> SlurmRanks:
        """The ranks of attempt `number`; LeaveNode if the job lacks a node that works."""
        before = self._pool.nodes.training
        self._pool.replace_failed(self._ranks.failed_nodes if self._ranks else ())
        if node := node_to_blame(self._run_dir, self._job, self._step):
            self._pool.replace(node, ReplacedBecause.RANKS_FAILED)
        if self._pool.nodes.training != before:
            self._step = self._checked_step()
        step = self._step
        where = ", ".join(step.nodes)
        _log.info("attempt %d: %s on %s", number, counted(step.ranks, "rank"), where)
        self._ranks = SlurmRanks(step, self._run_dir, number, self._claim(number))
        return self._ranks

    def _checked_step(self) -> Step:
        """The step on nodes that all see the run directory; ConfigError if those do not suffice."""
        while True:
            nodes = self._pool.nodes.training
            ranks = len(nodes) * self._cluster.tasks_per_node
            step = Step(nodes=nodes, ranks=ranks, cluster=self._cluster)
            blind = nodes_that_miss(step, self._run_dir.path)
            for node in blind:
                self._pool.replace(node, ReplacedBecause.RUN_DIRECTORY_UNSEEN)
            if not blind:
                return step
            if left := [node for node in blind if node in self._pool.nodes.training]:
                raise ConfigError(
                    f"{', '.join(left)} cannot see {self._run_dir.path}; "
                    "put the run on a disk that all nodes share"
                )


def first_nodes(
    config: RunConfig, ranks_per_node: int, names: tuple[str, ...], num_spare: int
) -> JobNodes:
    """The nodes that train at first: as many as share the lanes evenly, but for the spare ones."""
    most = len(names) - num_spare
    count = usable_nodes(config, ranks_per_node, most)
    if not count:
        for phase in runs_of_phases(config):
            accumulation_steps(phase, most * ranks_per_node)  # says what does not divide
    if count < most:
        _log.warning(
            "using %d of %d nodes so that data.lanes=%d divides", count, most, config.data.lanes
        )
    return JobNodes(names[:count], names[count:])


def node_to_blame(run_dir: RunDir, job: ThisJob, step: Step) -> str | None:
    """The node to leave out in the next attempt; ConfigError if no node at all can start ranks.

    Where the trainer was not even started, a container or an interpreter is missing. That is the
    fault of a node only if others have what it lacks.
    """
    ledger = run_dir.ledger.read()
    node = node_to_exclude(ledger, job.id, step.node_of)
    if not no_rank_started(ledger, job.id):
        return node
    unable = nodes_that_cannot_start(step, run_dir.path)
    if len(unable) == step.num_nodes and last_of(ledger, TrainingBegan) is None:
        raise ConfigError(
            f"the ranks' program does not start on any node ({', '.join(unable)}); "
            f"'launcher logs {run_dir.path} --errors' says why"
        )
    return node if node in unable else None
