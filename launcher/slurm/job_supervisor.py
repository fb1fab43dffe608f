"""`launcher batch`: the supervisor inside a Slurm job, which the job's script runs."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foundation.errors import EXIT_USER_ERROR, ConfigError, UserError
from foundation.retry import CLOCK, Clock, outlast
from foundation.settings import load_config
from launcher.restart_policy import RestartPolicy, StartAgain, add_policy_arguments, policy_of
from launcher.slurm.client import Slurm
from launcher.slurm.former_starts import attempts_without_progress
from launcher.slurm.job_exit import JobExit, ThisJob
from launcher.slurm.lost_nodes import FirstNodeGuard, NodePool, NodeProbe, use_up_old_numbers
from launcher.slurm.sbatch import Snapshot, own_work_dirs
from launcher.slurm.srun import Probe, SlurmRanks, Step, probe_nodes
from launcher.stop_signals import HOLDER, StopSignals, StopWhileWaiting
from launcher.supervisor import Supervisor, is_complete
from pretrain.checkpoint.verify import latest_step
from pretrain.config.cluster import load_cluster
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.rundir.events import Event, JobEnded, JobEndReason, JobStarted, SupervisorKilled
from pretrain.rundir.exit_statuses import EXIT_STOPPED
from pretrain.rundir.history import find_events, last_event
from pretrain.rundir.lock import StaleAttempt
from pretrain.rundir.ownership import ForeignRun, refuse_foreign_run
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.log import add_log_level_argument, set_up_logging
from pretrain.terminal.text import counted

_POLL_SECONDS = 1.0
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher batch`."""
    parser.add_argument("run_dir", type=Path, help="run directory")
    add_policy_arguments(parser)
    parser.add_argument(
        "--spare-nodes", type=int, default=0, metavar="S", help="nodes of the job that only replace"
    )
    add_log_level_argument(parser)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the supervisor acts through; tests script it."""

    slurm: Slurm = field(default_factory=Slurm)
    start_ranks: Callable[[Step, RunDir, int, str], SlurmRanks] = SlurmRanks
    probe: NodeProbe = probe_nodes
    clock: Clock = CLOCK


def run(arguments: argparse.Namespace, site: Site | None = None) -> int:
    """Train inside this job; whatever fails is recorded as the end of this start."""
    site = site or Site()
    set_up_logging("supervisor", arguments.log_level)
    job, stop = ThisJob.from_environment(), StopSignals()
    policy = policy_of(arguments)
    most = policy.attempts_without_progress
    job_exit = JobExit(job, arguments.run_dir, stop, most, site.slurm, site.clock)
    with stop:
        try:
            return _train(arguments, job, stop, policy, job_exit, site)
        except (StaleAttempt, ForeignRun, RunInUse):
            raise  # the ledger belongs to another one
        except ConfigError as error:  # another attempt would fail the same way
            job_exit.give_up(str(error))
            raise
        except Exception as error:
            if not isinstance(error, UserError):
                _log.exception("the supervisor failed")
            return job_exit.fail(error)


def _train(
    arguments: argparse.Namespace,
    job: ThisJob,
    stop: StopSignals,
    policy: RestartPolicy,
    job_exit: JobExit,
    site: Site,
) -> int:
    """Train as long as this start of the job lasts, and record its end; return the exit status."""
    refuse_foreign_run(arguments.run_dir)  # also a cell's, which others than its array may have
    # Storage may be away when the job starts, and with it the setting that says for how long.
    usual = stop.patience(CheckpointConfig().storage_patience_seconds, job_exit.poll, site.clock)
    experiment = Snapshot(arguments.run_dir).experiment
    status = EXIT_STOPPED
    with contextlib.suppress(StopWhileWaiting):
        config = outlast(usual, lambda: load_config(RunConfig, experiment))
        seconds = config.checkpoint.storage_patience_seconds
        run_dir = RunDir(arguments.run_dir, stop.patience(seconds, job_exit.poll, site.clock))
        if ended := end_of_start(run_dir.ledger.read(), job):
            return job_exit.complete(ended)
        if is_complete(run_dir, config):  # the job was requeued after its end
            _log.info("%s is done: there is nothing to do", run_dir.path)
            return 0
        if job_exit.is_allocated():
            await_former_ranks(job, run_dir, site, job_exit.poll)
            begin(job, run_dir, site.slurm, job_exit.began)
            use_up_old_numbers(run_dir.ledger.read(), job, job_exit.poll)
            spare = arguments.spare_nodes
            status = _make_attempts(job, run_dir, policy, stop, job_exit, spare, site)
    job_exit.finish(status)
    return EXIT_USER_ERROR if job_exit.has_given_up else status


def _make_attempts(
    job: ThisJob,
    run_dir: RunDir,
    policy: RestartPolicy,
    stop: StopSignals,
    job_exit: JobExit,
    num_spare: int,
    site: Site,
) -> int:
    """Make attempts in this start of the job; return the exit status."""
    ranks: SlurmRanks | None = None  # of the last attempt
    step: Step | None = None

    def start(number: int) -> SlurmRanks:
        nonlocal ranks, step
        if ranks and ranks.needs_new_start:
            raise StartAgain(JobEndReason.NO_STEPS)
        if not num_spare and len(left := job_exit.nodes()) < len(job.nodes):
            lost = ", ".join(node for node in job.nodes if node not in left)
            raise StartAgain(JobEndReason.NOT_STARTED, f"{lost} was taken from the job")
        step = pool.next_step(between)
        if num_spare:
            guard.ensure_running([*pool.nodes.training, *pool.nodes.spare])
        where = ", ".join(step.nodes)
        _log.info("attempt %d: %s on %s", number, counted(step.ranks, "rank"), where)
        ranks = site.start_ranks(step, run_dir, number, job_exit.claim(number))
        return ranks

    def probe(step: Step, path: Path, meanwhile: Callable[[], None]) -> Probe:
        answer = site.probe(step, path, meanwhile)
        if answer.problems and not job_exit.is_allocated():
            raise StopWhileWaiting  # it says nothing of the nodes
        return answer

    def between() -> None:
        job_exit.poll()
        if stop.requests:
            raise StopWhileWaiting

    count = attempts_without_progress(run_dir.ledger.read(), job.id)
    # Attempts that were lost together with their supervisors were not decided about.
    if count >= policy.attempts_without_progress:
        raise ConfigError(
            f"{count} attempts in a row brought no checkpoint beyond step "
            f"{latest_step(run_dir.checkpoints)}; remove the cause, then 'launcher resume'"
        )
    try:
        with run_dir.locked(HOLDER, is_fenced=True), FirstNodeGuard(job) as guard:
            clock, allocated, excludable = site.clock, job_exit.is_allocated, job_exit.excludable
            pool = NodePool(job, num_spare, run_dir, excludable, site.slurm, probe, clock)
            return Supervisor(
                run_dir, start, policy, stop, count, job_exit.poll, job.id, allocated, clock
            ).run()
    except StartAgain as again:
        if job_exit.is_allocated():  # else it says nothing of the nodes
            nodes = again.nodes
            if step and again.rank is not None:
                nodes = job_exit.excludable([step.node_of(again.rank)])
            job_exit.leave(again, nodes)
    except ConfigError:
        if job_exit.is_allocated():
            raise
    return EXIT_STOPPED


class RunInUse(ConfigError):
    """Another job has the run."""


def await_former_ranks(
    job: ThisJob, run_dir: RunDir, site: Site, meanwhile: Callable[[], None]
) -> None:
    """Wait until the ranks of a supervisor that was killed in this start of the job have ended.

    Their srun asked them to save and stop when it died (SlurmRanks). Those that need longer than
    the notice ahead of a time limit would give them are killed.
    """
    lost = open_start(run_dir.ledger.read(), job.id)
    if lost is None or lost.restart != job.restart:
        return
    patience = load_cluster(Snapshot(run_dir.path).cluster).signal_seconds
    slurm, clock = site.slurm, site.clock
    deadline = clock.now() + patience
    while steps := slurm.answered(slurm.steps, job.number):
        meanwhile()
        if clock.now() > deadline:
            _log.warning("ranks of a killed supervisor still run after %d s: killing", patience)
            for step in steps:
                slurm.cancel(step)
            return  # the step of the next attempt waits for what they hold
        clock.sleep(_POLL_SECONDS)


def begin(job: ThisJob, run_dir: RunDir, slurm: Slurm, began: str) -> None:
    """Record that this job has the run; RunInUse if another live job has it."""
    ledger, step = run_dir.ledger.read(), latest_step(run_dir.checkpoints)
    if lost := open_start(ledger, job.id):  # its supervisor could not write its end
        start = {"job": job.id, "restart": lost.restart, "step_before": lost.step, "step": step}
        if lost.restart != job.restart:
            end = JobEnded(reason=JobEndReason.FIRST_NODE_LOST, requeued=True, **start)
        elif "" != lost.began != began:
            end = JobEnded(reason=JobEndReason.FORGOTTEN, requeued=True, **start)
        else:
            end = SupervisorKilled(**start)
        run_dir.ledger.append(end)
    own = JobStarted(job=job.id, restart=job.restart, nodes=job.nodes, step=step, began=began)
    run_dir.ledger.append(own)
    # Each job writes its start before it looks for others, so of two jobs at least one sees the
    # other.
    ledger = run_dir.ledger.read()
    work_dirs = own_work_dirs(run_dir.path, ledger)
    for other in slurm.answered(slurm.jobs, other_jobs(ledger, job.id)):
        if other.is_live and other.work_dir in work_dirs:
            end = JobEnded(
                job=job.id,
                restart=job.restart,
                reason=JobEndReason.RUN_IN_USE,
                requeued=False,
                other_job=other.id,
            )
            run_dir.ledger.append(end)
            raise RunInUse(
                f"job {other.id} ({other.state.lower()}) has the run {run_dir.path}; "
                f"job {job.id} exits: wait for the other one, or end it first: scancel {other.id}"
            )


def end_of_start(ledger: Sequence[Event], job: ThisJob) -> JobEnded | None:
    """Return how this very start of the job ended, if a supervisor wrote that before it was killed.
    One that the controller forgot was another start, which may have had the same number."""
    last = last_event([end for end in find_events(ledger, JobEnded) if end.job == job.id], JobEnded)
    is_own = last and last.restart == job.restart and last.reason is not JobEndReason.FORGOTTEN
    return last if is_own else None


def open_start(ledger: Sequence[Event], job: str) -> JobStarted | None:
    """Return the last start of this job, if nothing was written about its end."""
    last = last_event([e for e in ledger if getattr(e, "job", "") == job], JobStarted, JobEnded)
    return last if isinstance(last, JobStarted) else None


def other_jobs(ledger: Sequence[Event], job: str) -> list[str]:
    """Return other jobs that started before this one and have no recorded end, latest first."""
    open_jobs: dict[str, None] = {}
    for event in ledger:
        if isinstance(event, JobStarted):
            if event.job == job:
                break
            open_jobs[event.job] = None
        elif isinstance(event, JobEnded) and not event.requeued:
            open_jobs.pop(event.job, None)
    return list(reversed(open_jobs))
