"""Histories of a supervised run: whatever happens at night, it trains or says why it cannot.

Rules plan what happens to the jobs of a run, their ranks, nodes, storage and controller, and let
time pass. Then all that is calm again, and the run has to finish, unless it was ended by a person
or by so many attempts of evidence against it, and says so.
"""

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from foundation.errors import UserError
from launcher.commands.resume import resume
from launcher.run_state import RunState, read_states
from launcher.run_status import State
from launcher.slurm.client import Slurm
from launcher.slurm.sbatch import Snapshot, render
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import CheckpointConfig, OptimConfig, RunConfig
from pretrain.rundir.events import JobEnded, JobEndReason, JobStarted, Submitted, TrainingBegan
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.jobs import job_of
from tests.histories.runner import MEMORY, HistoryMachine, Problem, kept_folder, told_rule
from tests.histories.scripted_site import (
    ENDS,
    KILL_WAIT,
    KILLED_TOO_OFTEN,
    STEPS,
    WARNING,
    Process,
    QueuedJob,
    Site,
)

PATIENCE = 600.0
MOST = 3  # attempts without progress
HOURS = 24.0
SOON = st.sampled_from([0.0, 2.0, 25.0, 70.0, 140.0, 400.0, 1000.0])
FOR = st.sampled_from([3.0, 40.0, 200.0, 900.0])
MOODS = ("down", "late", "slow", "lost", "empty", "cut", "banner")


@cache
def run_template() -> Path:
    """A run that was submitted, which every history begins with a copy of."""
    checkpoint = CheckpointConfig(storage_patience_seconds=PATIENCE)
    config = RunConfig(checkpoint=checkpoint, optim=OptimConfig(steps=STEPS))
    run_dir = RunDir.create(kept_folder() / "run", config)
    Snapshot(run_dir.path).take_settings(
        config, ClusterConfig(ranks_per_node=1, time_limit="01:00:00")
    )
    return run_dir.path


class SupervisorHistory(HistoryMachine):
    """A run on a cluster, what happens there, and what may follow from it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="history-", dir=MEMORY)).resolve()
        self.stack = contextlib.ExitStack()
        self.stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        shutil.copytree(run_template(), self.folder / "run")
        run_dir = self.folder / "run"
        script = render(job_of(run_dir, ClusterConfig(ranks_per_node=1)))
        Snapshot(run_dir).script.write_text(script)
        self.site = Site(self.folder, self.stack)
        self.site.after_start = self._after_start
        self.problem: Problem | None = None
        self.may_end: set[str] = set()  # why the run may end with steps left
        self.num_read = 0  # events of the ledger
        number, work_dir = Slurm().submit(Path("script"), str(Snapshot(run_dir).code))
        self.site.run_dir.ledger.append(Submitted(job=number, work_dir=work_dir))

    def teardown(self) -> None:
        try:
            if self.problem is None:
                self._calm_down()
                self.check()
        finally:
            self.stack.close()

    def check(self) -> None:
        if self.site.overlaps:
            self._note("two jobs train", self.site.overlaps[0])
        if self.site.revived:
            self._note("a canceled job starts again", self.site.revived)
        if self.site.overruns:
            self._note("a supervisor without an end")
        if self.problem is not None:
            raise self.problem

    def _note(self, kind: str, text: object = "") -> None:
        self.problem = self.problem or Problem(kind, f"{text} at {self.site.time:.0f} s")

    @property
    def job(self) -> QueuedJob:
        """The job that runs, else the last one."""
        live = [job for job in self.site.jobs if job.is_live]
        return (live or self.site.jobs)[-1]

    def _later(self, after: float, act: Callable[[QueuedJob], object]) -> None:
        self.site.later(after, lambda: act(self.job))

    # -------------------------------------------------------------------------------- what happens

    @told_rule(kinds=st.lists(st.sampled_from(["", *ENDS]), min_size=1, max_size=4))
    def plan_attempts(self, kinds: list[str]) -> None:
        self.site.plans += kinds

    @told_rule(seconds=st.sampled_from([1.0, 20.0, 100.0]))
    def stop_slowly(self, seconds: float) -> None:
        self.site.seconds_to_stop = seconds

    @told_rule(after=SOON, seconds=FOR, mood=st.sampled_from(MOODS))
    def change_mood(self, after: float, seconds: float, mood: str) -> None:
        site = self.site
        site.later(after, lambda: site.moods.append((site.time + seconds, mood)))

    @told_rule(after=SOON, grace=st.sampled_from([0.0, 60.0]))
    def preempt(self, after: float, grace: float) -> None:
        def act(job: QueuedJob) -> None:
            if job.state != "RUNNING":
                return
            job.preempt_time = "2026-11-28T00:00:00"
            if not job.may_requeue:
                self.may_end.add("requeue")
            if not grace:
                self.site.end(job, "PREEMPTED", "PREEMPTION")
                return
            start = job.starts
            self.site.signal(job, signal.SIGTERM)
            self.site.later(
                grace,
                lambda: job.starts == start and self.site.end(job, "PREEMPTED", "PREEMPTION", 5.0),
            )

        self._later(after, act)

    @told_rule(after=SOON, node=st.integers(0, 1), seconds=FOR)
    def lose_node(self, after: float, node: int, seconds: float) -> None:
        def act(job: QueuedJob) -> None:
            if job.state != "RUNNING" or not job.nodes[node:]:
                return
            self.site.down[job.nodes[node]] = self.site.time + seconds
            start = job.starts
            self._forbidden(job)
            self.site.end(job, "NODE_FAIL", "NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS")
            if node == 0:  # the supervisor's
                self.site.counted += self.site.run_dir.path.exists()  # else `_after_start` does
                self.site.kill(job, start)

        self._later(after, act)

    @told_rule(after=SOON, held=st.booleans())
    def requeue(self, after: float, held: bool) -> None:
        def act(job: QueuedJob) -> None:
            if job.state == "RUNNING" and job.may_requeue:
                self.site.end(job, "REQUEUED", "JOB REQUEUE")
                if held:
                    job.state = "REQUEUE_HOLD"
                    self.site.later(3000.0, lambda: release(job))

        def release(job: QueuedJob) -> None:
            job.state = "PENDING" if job.state == "REQUEUE_HOLD" else job.state

        self._later(after, act)

    @told_rule(after=SOON)
    def cancel(self, after: float) -> None:
        def act(job: QueuedJob) -> None:
            self.may_end.add("canceled")
            self.site.cancel(job)

        self._later(after, act)

    @told_rule(after=SOON, seconds=FOR)
    def forget_start(self, after: float, seconds: float) -> None:
        """The controller was killed soon after a start, and has the job as it was before."""

        def act(job: QueuedJob) -> None:
            if job.state == "RUNNING" and self.site.time - job.began < 30.0:
                start, job.state, job.nodes, job.reason = job.starts, "PENDING", (), "Priority"
                job.begins = self.site.time + seconds
                self.site.later(60.0, lambda: self.site.kill(job, start))

        self._later(after, act)

    @told_rule(after=SOON, minutes=st.sampled_from([1, 4, 10, 240]))
    def change_limit(self, after: float, minutes: int) -> None:
        def act(job: QueuedJob) -> None:
            job.limit = 60.0 * minutes
            if job.state == "RUNNING":
                self.site.arm(job)

        self._later(after, act)

    @told_rule(after=SOON, how=st.sampled_from(["name", "comment", "Requeue=0", "nodes"]))
    def update(self, after: float, how: str) -> None:
        def act(job: QueuedJob) -> None:
            if how == "name":
                job.name = "proj.books"
            elif how == "comment":
                job.comment = b"gepr\xfcft"
            elif how == "Requeue=0":
                job.may_requeue = False
                self.may_end.add("requeue")
            else:
                job.nodes = job.nodes[:1]

        self._later(after, act)

    @told_rule(after=SOON, seconds=FOR)
    def take_storage_away(self, after: float, seconds: float) -> None:
        self.site.later(after, lambda: self.site.take_storage_away(seconds))

    @told_rule(after=SOON)
    def remove_logs(self, after: float) -> None:
        self.site.later(after, self.site.remove_logs)

    @told_rule(after=SOON, number=st.sampled_from([10, 12, 15]), to_ranks=st.booleans())
    def send_signal(self, after: float, number: int, to_ranks: bool) -> None:
        def act(job: QueuedJob) -> None:
            if not to_ranks and number != signal.SIGUSR2:
                self.site.signal(job, number)
                return
            for ranks in self.site.ranks:
                if ranks.process.job is job and ranks.status is None:
                    ranks.send_signal(number)

        self._later(after, act)

    @told_rule(after=SOON)
    def end_srun(self, after: float) -> None:
        self.site.later(after, lambda: [ranks.end_from_outside() for ranks in self.site.ranks])

    @told_rule(after=SOON)
    def kill_supervisor(self, after: float) -> None:
        self.site.later(after, lambda: self.site.kill_supervisor(self.job))

    @told_rule(after=SOON, seconds=FOR, node=st.integers(0, 1), how_far=st.integers(0, 2))
    def break_node(self, after: float, seconds: float, node: int, how_far: int) -> None:
        def act(job: QueuedJob) -> None:
            if job.nodes[node:]:
                self.site.blind[job.nodes[node]] = (self.site.time + seconds, how_far)

        self._later(after, act)

    # ------------------------------------------------------------------------------ what people do

    @told_rule(after=SOON)
    def look(self, after: float) -> None:
        self.site.later(after, self._look)

    @told_rule(after=SOON)
    def resume(self, after: float) -> None:
        self.site.later(after, self._resume)

    @told_rule(minutes=st.sampled_from([1, 10, 100]))
    def wait(self, minutes: int) -> None:
        self.site.run_until(self.site.time + 60.0 * minutes)

    def _status(self) -> RunState | None:
        """What `launcher status` says; None if it cannot."""
        try:
            with self.site.person():
                return read_states([self.site.run_dir.path])[0]
        except UserError as error:
            if self.site.run_dir.path.exists():
                self._note("no status", error)
        except Exception as error:
            self._note("a traceback of status", repr(error))
        return None

    def _look(self) -> RunState | None:
        is_sure = self.site.mood in ("", "banner", "slow")
        # Time passes while it asks. A job whose submission is not over has no entry yet.
        events = self.site.run_dir.ledger.read() if self.site.run_dir.path.exists() else []
        known = {event.job for event in events if isinstance(event, (Submitted, JobStarted))}
        before = [job for job in self.site.jobs if job.is_live and str(job.number) in known]
        state = self._status()
        live = [job for job in before if job.is_live and job is self.site.jobs[-1]]
        if state and live and is_sure and self.site.mood in ("", "banner", "slow"):
            alive = (*_ALIVE, State.DONE) if self.site.saved_step == STEPS else _ALIVE
            if state.state not in alive:
                self._note("status calls a live job over", state.description)
        return state

    def _resume(self) -> None:
        live = [job for job in self.site.jobs if job.is_live]
        before, self.may_end = self.may_end, set()
        try:
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                self.site.person(),
            ):
                resume(self.site.run_dir.path)
        except (UserError, OSError):
            self.may_end |= before
            return
        except Exception as error:
            self._note("a traceback of resume", repr(error))
            return
        if any(job.is_live for job in live):
            self._note("a second job was submitted", [job.state for job in live])
        self.site.counted = 0

    # -------------------------------------------------------------------------------- what follows

    def _forbidden(self, job: QueuedJob) -> None:
        if not job.may_requeue:
            self.may_end.add("requeue")

    def _after_start(self, job: QueuedJob, process: Process, status: int | None) -> None:
        """Compare how a supervisor ended with the ledger and the job."""
        if status == KILLED_TOO_OFTEN:
            self.may_end.add("killed")
        is_away = not self.site.run_dir.path.exists()
        ledger = (self.site.away if is_away else self.site.run_dir).ledger.read()
        new, self.num_read = ledger[self.num_read :], len(ledger)
        ends = [e for e in find_events(new, JobEnded) if e.job == str(job.number)]
        for end in ends:
            is_storage = "storage_patience_seconds" in end.message
            if end.reason is JobEndReason.SUPERVISOR_FAILED and not is_storage:
                self._note("the supervisor failed", end.message)
        was_away = is_away or self.site.time - self.site.storage_back < 60.0  # Slurm does not wait
        has_end = any(end.restart == process.restart for end in ends)
        # The next start cannot tell an end that storage did not take from a lost first node.
        self.site.counted += was_away and not has_end
        is_asking = self.site.time - self.site.unanswered < WARNING + KILL_WAIT
        # Without the warning there is KillWait, in which few questions are answered slowly.
        is_asking |= not job.is_warned and self.site.time - self.site.slow_answer < KILL_WAIT
        if status is None and job.end == "TIMEOUT" and is_asking:  # Slurm let it requeue nothing
            self.may_end.add("requeue")
        if is_away or status is None or status == KILLED_TOO_OFTEN:
            return
        is_superseded = any(one.starts and one.number > job.number for one in self.site.jobs)
        if (
            process.start < job.starts or is_superseded
        ):  # it was forgotten, another start has the run
            return
        if not was_away and not has_end:
            self._note("no end is recorded", f"exit {status}")
        has_given_up = bool(ends) and ends[-1].reason in _GAVE_UP
        has_given_up &= not any(end.requeued or end.is_final for end in ends[-1:])
        if ends and not was_away and has_given_up != (status == 2):
            self._note("ledger and exit disagree", f"exit {status}, {ends[-1].description}")
        is_done = self.site.saved_step == STEPS
        if status == 0 and not is_done:
            self._note("exit status 0 with steps left")
        if status == 2:
            # Before a short limit, or all of them on a site that fails.
            in_a_row = ("starts in a row", f"{MOST} times in a row")
            is_futile = ends and any(words in ends[-1].message for words in in_a_row)
            refused = is_futile or any(ranks.plan == "refused" for ranks in self.site.ranks[-1:])
            # An environment that starts nowhere, or a disk that nobody shares, before training.
            is_alone = len(self.site.blind) < len(process.nodes)
            has_ground = not (is_alone or find_events(ledger, TrainingBegan))
            if not refused and self.site.counted < MOST and not has_ground:
                self._note("given up without evidence", ends[-1].cause if ends else "")
            self.may_end.add("evidence")

    def _calm_down(self) -> None:
        """Let all that has failed work again, and the run come to its end."""
        site = self.site
        site.run_until(site.time + 4000.0)
        site.moods, site.plans, site.blind, site.down = [], [], {}, {}
        end = site.time + 3600.0 * HOURS
        while site.time < end and any(job.is_live for job in site.jobs) and not self.problem:
            site.run_until(site.time + 600.0)
        state = self._status()
        if state is None or self.problem or site.overlaps:
            return
        is_done = site.saved_step == STEPS
        if any(job.is_live for job in site.jobs):
            self._note("no end in time", state.description)
        elif is_done != (state.state is State.DONE):
            self._note("status and checkpoints disagree", state.description)
        elif not is_done and not self.may_end:
            self._note("given up", state.description)
        elif not is_done and (state.is_active or not state.reason):
            self._note("an end without a reason", state.description)


_GAVE_UP = (
    *(JobEndReason.GAVE_UP, JobEndReason.ERROR, JobEndReason.RUN_IN_USE),
    JobEndReason.SUPERVISOR_FAILED,
)
_ALIVE = (State.RUNNING, State.QUEUED, State.REQUEUED, State.PREEMPTED, State.UNRESPONSIVE)
