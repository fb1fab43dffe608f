"""`launcher batch`: the supervisor inside a Slurm job, run by the job's batch script."""

import argparse
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from foundation.errors import EXIT_USER_ERROR, ConfigError, UserError
from foundation.settings import load_config
from launcher.restart_policy import (
    RestartPolicy,
    StartAgain,
    add_policy_arguments,
    requested_policy,
)
from launcher.slurm.client import Slurm
from launcher.slurm.former_starts import (
    attempts_without_progress,
    end_of_start,
    open_start,
    other_jobs,
)
from launcher.slurm.job_exit import JobExit, ThisJob
from launcher.slurm.lost_nodes import FirstNodeGuard, NodePool, NodeProbe, use_up_old_numbers
from launcher.slurm.sbatch import Snapshot, own_work_dirs
from launcher.slurm.srun import Probe, SlurmRanks, Step, probe_nodes
from launcher.stop_signals import HOLDER, StopSignals, StopWhileWaiting
from launcher.supervisor import Supervisor, is_complete
from pretrain.checkpoint.storage_retry import CLOCK, Clock, StorageRetry, with_retries
from pretrain.checkpoint.verify import latest_step
from pretrain.config.cluster import load_cluster
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.rundir.events import JobEnded, JobEndReason, JobStarted, SupervisorKilled
from pretrain.rundir.exit_statuses import EXIT_STOPPED
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
    words = "nodes only to replace failed ones"
    parser.add_argument("--spare-nodes", type=int, default=0, metavar="S", help=words)
    add_log_level_argument(parser)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The supervisor's interfaces to Slurm, ranks and time; tests replace them."""

    slurm: Slurm = field(default_factory=Slurm)
    start_ranks: Callable[[Step, RunDir, int, str], SlurmRanks] = SlurmRanks
    probe: NodeProbe = probe_nodes
    clock: Clock = CLOCK


def run(arguments: argparse.Namespace, site: Site | None = None) -> int:
    """Train inside this job; return the exit status."""
    set_up_logging("supervisor", arguments.log_level)
    policy, num_spare = requested_policy(arguments), arguments.spare_nodes
    return JobSupervisor(arguments.run_dir, policy, num_spare, site or Site()).run()


class RunInUse(ConfigError):
    """Another job has the run."""


class JobSupervisor:
    """Supervises a run in this start of the job, and records any failure as the start's end."""

    def __init__(self, path: Path, policy: RestartPolicy, num_spare: int, site: Site) -> None:
        self._path, self._policy, self._num_spare, self._site = path, policy, num_spare, site
        self._job, self._stop = ThisJob.from_environment(), StopSignals()
        most_attempts = policy.attempts_without_progress
        self._exit = JobExit(self._job, path, self._stop, most_attempts, site.slurm, site.clock)
        self._step: Step | None = None  # of the latest attempt
        self._ranks: SlurmRanks | None = None  # of the latest attempt

    def run(self) -> int:
        """Train as long as this start of the job lasts; return the exit status."""
        with self._stop:
            try:
                return self._train()
            except (StaleAttempt, ForeignRun, RunInUse):
                raise  # not recorded: the ledger belongs to another job or attempt
            except ConfigError as error:  # another attempt would fail the same way
                self._exit.end_with_error(str(error))
                raise
            except Exception as error:
                if not isinstance(error, UserError):
                    _log.exception("the supervisor failed")
                return self._exit.end_after_error(error)

    def _train(self) -> int:
        # Since the submission another user may have put a run into the directory.
        refuse_foreign_run(self._path)
        # Until the run's own setting can be read, wait for storage as long as the default says.
        usual = self._retry(CheckpointConfig().storage_patience_seconds)
        experiment = Snapshot(self._path).experiment
        status = EXIT_STOPPED
        with contextlib.suppress(StopWhileWaiting):
            config = with_retries(usual, lambda: load_config(RunConfig, experiment))
            retry = self._retry(config.checkpoint.storage_patience_seconds)
            run_dir = RunDir(self._path, retry)
            if ended := end_of_start(run_dir.ledger.read(), self._job.id, self._job.restart):
                return self._exit.end_as_recorded(ended)
            if is_complete(run_dir, config):  # its job was requeued, or its supervisor killed
                _log.info("%s is done: there is nothing to do", run_dir.path)
                status = 0
            elif self._exit.is_allocated():
                self._await_former_ranks(run_dir)
                begin(self._job, run_dir, self._site.slurm, self._exit.began)
                use_up_old_numbers(run_dir.ledger.read(), self._job, self._exit.poll)
                status = self._make_attempts(run_dir)
        self._exit.end_after_attempts(status)
        return EXIT_USER_ERROR if self._exit.has_given_up else status

    def _retry(self, seconds: float) -> StorageRetry:
        return self._stop.retry(seconds, self._exit.poll, self._site.clock)

    def _await_former_ranks(self, run_dir: RunDir) -> None:
        """Wait for the ranks of a supervisor that was killed in this same start of the job.

        When a supervisor dies, its srun gets a signal and asks the ranks to save and stop
        (`SlurmRanks`). After `signal_seconds`, as before the job's time limit, they are killed.
        """
        lost = open_start(run_dir.ledger.read(), self._job.id)
        if lost is None or lost.restart != self._job.restart:
            return
        seconds = load_cluster(Snapshot(run_dir.path).cluster).signal_seconds
        slurm, clock = self._site.slurm, self._site.clock
        deadline = clock.now() + seconds
        while steps := slurm.answered(slurm.steps, self._job.number):
            self._exit.poll()
            if clock.now() > deadline:
                _log.warning("ranks of a killed supervisor still run after %d s: killing", seconds)
                for step in steps:
                    slurm.cancel(step)
                return  # Slurm ends them within KillWait; the next claim stops their writes
            clock.sleep(_POLL_SECONDS)

    def _make_attempts(self, run_dir: RunDir) -> int:
        """Make attempts in this start of the job; return the exit status."""
        job, site = self._job, self._site
        count = attempts_without_progress(run_dir.ledger.read(), job.id)
        # The policy ends a run after this many attempts. It has not seen the attempts that were
        # lost together with their supervisors, so they are counted here.
        if count >= self._policy.attempts_without_progress:
            raise ConfigError(
                f"{count} attempts in a row brought no checkpoint beyond step "
                f"{latest_step(run_dir.checkpoints)}; remove the cause, then 'launcher resume'"
            )
        try:
            with run_dir.locked(HOLDER, is_fenced=True), FirstNodeGuard(job) as guard:
                if self._num_spare:
                    guard.ensure_running(job.nodes)
                excludable = self._exit.excludable
                pool = NodePool(
                    job, self._num_spare, run_dir, excludable, site.slurm, self._probe, site.clock
                )
                return Supervisor(
                    run_dir,
                    lambda number: self._start(number, run_dir, pool, guard),
                    self._policy,
                    self._stop,
                    count,
                    meanwhile=self._exit.poll,
                    job=job.id,
                    is_allocated=self._exit.is_allocated,
                    clock=site.clock,
                ).run()
        except StartAgain as again:
            # If the job has lost its nodes, a failure does not mean that they are broken.
            if self._exit.is_allocated():
                nodes = again.nodes
                if self._step and again.rank is not None:
                    nodes = self._exit.excludable([self._step.node_of(again.rank)])
                self._exit.end_to_start_again(again, nodes)
        except ConfigError:
            if self._exit.is_allocated():
                raise
        return EXIT_STOPPED

    def _start(
        self, number: int, run_dir: RunDir, pool: NodePool, guard: FirstNodeGuard
    ) -> SlurmRanks:
        """Start the ranks of an attempt; raise StartAgain if this start of the job cannot."""
        if self._ranks and self._ranks.needs_new_start:
            raise StartAgain(JobEndReason.NO_STEPS)
        if not self._num_spare and len(left := self._exit.nodes()) < len(self._job.nodes):
            lost = ", ".join(node for node in self._job.nodes if node not in left)
            raise StartAgain(JobEndReason.NOT_STARTED, f"{lost} was taken from the job")
        step = self._step = pool.next_step(self._poll_before_attempt)
        if self._num_spare:
            guard.ensure_running([*pool.nodes.training, *pool.nodes.spare])
        where = ", ".join(step.nodes)
        _log.info("attempt %d: %s on %s", number, counted(step.ranks, "rank"), where)
        self._ranks = self._site.start_ranks(step, run_dir, number, self._exit.claim(number))
        return self._ranks

    def _probe(self, step: Step, path: Path, meanwhile: Callable[[], None]) -> Probe:
        answer = self._site.probe(step, path, meanwhile)
        if answer.problems and not self._exit.is_allocated():
            raise StopWhileWaiting  # the job has lost its nodes: they may be healthy
        return answer

    def _poll_before_attempt(self) -> None:
        self._exit.poll()
        if self._stop.requests:
            raise StopWhileWaiting


def begin(job: ThisJob, run_dir: RunDir, slurm: Slurm, began: str) -> None:
    """Record that this job has the run; RunInUse if another live job has it."""
    ledger, step = run_dir.ledger.read(), latest_step(run_dir.checkpoints)
    if lost := open_start(ledger, job.id):  # its supervisor was killed before it wrote the end
        start = {"job": job.id, "restart": lost.restart, "step_before": lost.step, "step": step}
        # The number of the restart and the time of the start show what happened: Slurm requeued the
        # job, the controller forgot the start and repeated it, or only the supervisor was killed.
        if lost.restart != job.restart:
            end = JobEnded(reason=JobEndReason.FIRST_NODE_LOST, requeued=True, **start)
        elif "" != lost.began != began:
            end = JobEnded(reason=JobEndReason.FORGOTTEN, requeued=True, **start)
        else:
            end = SupervisorKilled(**start)
        run_dir.ledger.append(end)
    own = JobStarted(job=job.id, restart=job.restart, nodes=job.nodes, step=step, began=began)
    run_dir.ledger.append(own)
    # Write our start before looking for other jobs. If two jobs start at once, at least one then
    # sees the other in the ledger.
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
