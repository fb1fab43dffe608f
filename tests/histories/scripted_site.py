"""A cluster in this process: its controller, its nodes, a person and a clock of its own.

The supervisor, its questions to Slurm, its sruns and what the person types are the real code; only
what Slurm's commands and sruns do is scripted, below `subprocess`. Sleeping moves the clock, and
whatever is due then happens: a signal arrives, a job is killed, another one starts.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import launcher.run_state
import launcher.run_status
import launcher.slurm.client
import launcher.slurm.job_exit
import launcher.slurm.lost_nodes
import launcher.slurm.srun
import launcher.stop_signals
import pretrain.checkpoint.storage_retry
import pretrain.rundir.attempt_files
import pretrain.rundir.ledger
import pretrain.rundir.lock
import pretrain.rundir.run_dir
from foundation.errors import exit_status_of
from foundation.settings import load_config
from launcher.slurm import job_supervisor
from launcher.slurm.sbatch import Snapshot
from launcher.slurm.task import write_status
from pretrain.rundir.events import Outcome, TrainingBegan, TrainingEnded
from pretrain.rundir.exit_statuses import EXIT_STOPPED
from pretrain.rundir.lock import VARIABLE, Fence, StaleAttempt
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step

EPOCH = 1.8e9
STEPS, INTERVAL, SECONDS_PER_STEP = 60, 10, 5.0
STARTING = 20.0  # seconds until ranks train
WARNING, KILL_WAIT = 180.0, 30.0  # before a time limit, and after it
NODES = tuple(f"n{number}" for number in range(1, 7))
_FIELD = re.compile("%(.)")  # of squeue or sinfo
KILLED_TOO_OFTEN = 137
LONGEST_START = 5 * 3600.0  # of any limit here
LEAST_SLEEP = 1.0  # seconds, so that polling for minutes takes few turns
# What ranks do instead of training to the end: after how long, and how rank 0 and 1 end.
# None: no status, no log. The last one is how the supervisor may count it.
ENDS: dict[str, tuple[float, tuple[int | None, int | None], str]] = {
    "crash": (60.0, (1, -15), "run"),
    "late crash": (150.0, (1, -15), "run"),
    "killed": (90.0, (-9, -15), "run"),
    "hang": (400.0, (-14, -9), "run"),
    "refused": (25.0, (2, -15), "refused"),
    "memory": (40.0, (76, 76), "memory"),
    "storage": (30.0, (74, -15), "site"),
    "unstarted": (5.0, (-15, None), "node"),
    "unlaunched": (5.0, (None, None), "node"),
    "step limit": (1.0, (None, None), "steps"),  # K times in a row are too many
}
TRAINS = {"hang": 60.0}  # for so long
NO_ANSWER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


class Killed(BaseException):
    """A supervisor is killed: no handler gets to do anything."""


@dataclass
class QueuedJob:
    """A job as the controller sees it."""

    number: int
    work_dir: str
    name: str = "books"
    limit: float = 3600.0
    state: str = "PENDING"
    reason: str = "Priority"
    restarts: int = 0
    may_requeue: bool = True
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    preempt_time: str = "None"
    comment: bytes = b""
    starts: int = 0  # with those that the controller forgot
    began: float = 0.0
    begins: float = 0.0  # not before
    end: str = ""  # accounting's state, once the end has come
    ended: float = 0.0
    is_canceled: bool = False  # by a person
    is_warned: bool = True  # its limit leaves the time that was asked for before it

    @property
    def is_live(self) -> bool:
        return self.state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUE_HOLD")


@dataclass
class Process:
    """The supervisor of one start of a job."""

    job: QueuedJob
    start: int
    restart: int
    nodes: tuple[str, ...]
    until: float  # when it has ended, whatever happens
    is_killed: bool = False
    is_restarted: bool = False  # the supervisor alone was killed
    signals: list[int] = field(default_factory=list)  # that wait until it runs
    received: list[int] = field(default_factory=list)


class Srun:
    """The srun of an attempt's ranks, or one that does nothing but print."""

    def __init__(
        self, site: Site, command: Sequence[str], stdout: Any, env: dict[str, str]
    ) -> None:
        self.site, self.pid, self.stdout = site, 1 << 30, stdout
        self.process = site.processes[-1]
        self.status: int | None = None
        self.until = site.time
        self.is_ranks = "launcher.slurm.task" in command and "starts" not in command
        nodes = next(each for each in command if each.startswith("--nodelist=")).split("=")[1]
        self.nodes = nodes.split(",")
        if self.is_ranks:
            self.log = Path(command[command.index("launcher.slurm.task") + 1])
            self.token = env[VARIABLE]
            self.plan = site.plans.pop(0) if site.plans else ""
            self.began, self.trains, self.first = site.time, False, site.saved_step
            self.stops: float | None = None
            for rank, status in enumerate(ENDS.get(self.plan, (0, (0, 0)))[1]):
                if status is not None:
                    with contextlib.suppress(OSError):
                        Path(str(self.log).replace("{rank}", str(rank))).touch()
            site.start_ranks(self)
        elif "bash" in command:
            self._probe()

    def _probe(self) -> None:
        words = ("begun", "sees", "starts")
        for node in self.nodes:
            until = self.site.blind.get(node, (0.0, 0))
            count = until[1] if self.site.time < until[0] else 3
            count = min(count, 1) if not self.site.run_dir.path.exists() else count
            for word in words[:count]:
                self.stdout.write(f"xl|{node}|{word}|lx\n".encode())
            if count == 0:
                self.until = max(self.until, until[0])
        self.until += 1.0

    def poll(self) -> int | None:
        if not self.is_ranks and self.site.time >= self.until:
            self.status = 0
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        self.end((-9, -9))
        return self.status or 0

    def send_signal(self, number: int) -> None:
        if self.stops is None:
            self.stops = self.site.time + self.site.seconds_to_stop

    def terminate(self) -> None:
        self.end((-15, -15))

    def kill(self) -> None:
        self.end((-9, -9))

    def advance(self) -> None:
        """Let the ranks do what they have done by now."""
        if self.status is not None or not self.is_ranks:
            return
        age = self.site.time - self.began
        seconds, statuses, _ = ENDS.get(self.plan, (1e9, (0, 0), ""))
        if age >= STARTING and not self.trains and seconds > STARTING:
            self._begin()
        if self.trains and self.status is None:
            self._train(
                min(age, seconds, TRAINS.get(self.plan, age)),
                self.stops is not None and self.site.time >= self.stops,
            )
        elif self.stops is not None and self.status is None and self.site.time >= self.stops:
            self.end((EXIT_STOPPED, EXIT_STOPPED))
        if age >= seconds and self.status is None:
            self.end(statuses)

    def _begin(self) -> None:
        try:
            Fence(self.site.run_dir.path, self.token).check()
            event = TrainingBegan(step=self.first, world_size=2, attempt=self.token)
            self.site.run_dir.ledger.append(event)
            self.trains = True
        except StaleAttempt:
            self.end((2, 2))
        except OSError:  # they wait
            self.began += 1.0

    def _train(self, age: float, is_stopping: bool) -> None:
        """Save what is due; end after the last step, or if the ranks are to stop."""
        made = min(STEPS, self.first + int((age - STARTING) / SECONDS_PER_STEP))
        is_over = made == STEPS or is_stopping
        due = made if is_over else max(self.first, made - made % INTERVAL)
        folder = self.site.run_dir.checkpoints
        try:
            if not folder.exists():  # storage is away
                return
            if due > self.site.saved_step:
                Fence(self.site.run_dir.path, self.token).check()
                publish_step(folder, due, num_ranks=1)
                self.site.saved_step, self.site.counted = due, 0
            if is_over:
                how = Outcome.FINISHED if made == STEPS else Outcome.STOPPED
                self.site.run_dir.ledger.append(TrainingEnded(step=due, outcome=how))
                status = 0 if made == STEPS else EXIT_STOPPED
                self.end((status, status))
        except StaleAttempt:
            self.end((2, 2))
        except FileNotFoundError:
            pass

    def end_from_outside(self) -> None:
        """Somebody sends SIGTERM to srun, which kills its ranks."""
        if self.status is None and self.is_ranks:
            with contextlib.suppress(OSError), open(self.log.parent / "srun.log", "a") as file:
                file.write("srun: forcing job termination\n")
            self.stops = self.site.time  # it is no evidence against the run
            self.end((-9, -9), are_lost=True)

    def end(self, statuses: Sequence[int | None], are_lost: bool = False) -> None:
        """End with these statuses of the ranks, written as their tasks do."""
        if self.status is not None:
            return
        self.status = 0 if not any(statuses) else 1
        if not self.is_ranks:
            return
        for rank, status in enumerate(statuses):
            log = Path(str(self.log).replace("{rank}", str(rank)))
            if status is not None and not are_lost:
                with contextlib.suppress(OSError):
                    write_status(log, status)
                    log.touch()
        with contextlib.suppress(OSError):
            if self.plan == "step limit":
                with open(self.log.parent / "srun.log", "a") as file:
                    file.write("srun: error: Unable to create step: Step limit reached\n")
        self.site.ended_ranks(self)


def _known_config(kind: Any, path: Path) -> Any:
    """What `load_config` returns: no history changes settings."""
    content = path.read_bytes()
    if content not in _configs:
        _configs[content] = load_config(kind, path)
    return _configs[content]


_configs: dict[bytes, Any] = {}


class Site:
    """The cluster. `stack` ends with it: until then the launcher's modules see its time, its
    commands and its hosts."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.run_dir = RunDir(folder / "run")
        self.away = RunDir(folder / "away")  # the same while its storage is away
        self.time = 0.0
        self.saved_step = 0  # of the latest checkpoint
        self.jobs: list[QueuedJob] = []
        self.processes: list[Process] = []  # the last one runs, the others wait for it
        self.ranks: list[Srun] = []
        self.plans: list[str] = []  # of the next attempts
        self.blind: dict[str, tuple[float, int]] = {}  # until when, and how far probes come
        self.down: dict[str, float] = {}  # nodes that Slurm does not use until then
        self.moods: list[tuple[float, str]] = []  # of the controller, until when
        self.person_at: int | None = None  # how many processes there were when a person typed
        self.seconds_to_stop = 3.0
        self.counted = 0  # attempts in a row that are evidence against the run
        self.after_start: Callable[[QueuedJob, Process, int | None], None] = lambda *_: None
        self.errors: list[str] = []
        self.overlaps: list[str] = []
        self.overruns = False
        self.revived: list[int] = []  # jobs that start although somebody has canceled them
        self.storage_back = -1e9  # when it was
        self.unanswered = -1e9  # when the controller last gave no answer
        self.slow_answer = -1e9  # when it last gave one
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        clock = SimpleNamespace(
            time=lambda: EPOCH + self.time,
            monotonic=lambda: self.time,
            sleep=lambda seconds: self.pass_by(max(seconds, LEAST_SLEEP)),
        )
        module: ModuleType
        for module in (
            pretrain.checkpoint.storage_retry,
            launcher.run_state,
            launcher.run_status,
            launcher.slurm.job_exit,
            launcher.slurm.lost_nodes,
            launcher.slurm.srun,
            launcher.stop_signals,
            pretrain.rundir.attempt_files,
            pretrain.rundir.ledger,
        ):
            stack.enter_context(mock.patch.object(module, "time", clock))
        commands = SimpleNamespace(**vars(subprocess))
        commands.run, commands.Popen = self._run, self._popen
        for module in (launcher.slurm.client, launcher.slurm.srun, launcher.slurm.lost_nodes):
            stack.enter_context(mock.patch.object(module, "subprocess", commands))
        for module in (launcher.slurm.srun, launcher.slurm.lost_nodes):
            kill = mock.patch.object(module, "kill_silently", self._kill_ranks)
            stack.enter_context(kill)
        for module in (
            job_supervisor,
            launcher.slurm.lost_nodes,
            launcher.run_state,
            pretrain.rundir.run_dir,
        ):
            stack.enter_context(mock.patch.object(module, "load_config", _known_config))
        hosts = SimpleNamespace(gethostname=lambda: self.host)
        stack.enter_context(mock.patch.object(pretrain.rundir.lock, "socket", hosts))
        stack.enter_context(mock.patch.dict(os.environ))
        for number in (signal.SIGTERM, signal.SIGUSR1):  # a supervisor that has ended is not us
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))

    @property
    def host(self) -> str:
        return self.processes[-1].nodes[0] if self.processes else "login"

    # ------------------------------------------------------------------------------------- time

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.time + seconds, next(self._numbers), act))

    def pass_by(self, seconds: float) -> None:
        """Let time pass, and what is due happen; Killed if that ends the process that runs."""
        end = self.time + seconds
        while self._events and self._events[0][0] <= end:
            when, _, act = heapq.heappop(self._events)
            self.time = max(self.time, when)
            act()
            self._settle()
        self.time = max(self.time, end)
        for ranks in self.ranks:
            ranks.advance()
        self._settle()

    def _settle(self) -> None:
        if not self.processes:
            return
        if len(self.processes) != self.person_at:  # else they come when the command has ended
            self._hit(self.processes[-1])
        if len(self.processes) < 2 and (job := self._startable()):
            self.start(job)
            self._settle()

    def _hit(self, mine: Process) -> None:
        """Deliver signals to the supervisor that runs; Killed if it was killed."""
        if self.time > mine.until:  # Slurm has ended it long ago
            self.overruns, mine.is_killed = True, True
        if mine.is_killed or mine.is_restarted:
            mine.is_restarted = False
            raise Killed
        while mine.signals:
            mine.received.append(mine.signals.pop(0))
            signal.raise_signal(mine.received[-1])

    @contextlib.contextmanager
    def person(self) -> Iterator[None]:
        """Whatever time a person's command takes, what ends a supervisor does not end it."""
        before, self.person_at = self.person_at, len(self.processes)
        try:
            yield
        finally:
            self.person_at = before

    def run_until(self, end: float) -> None:
        """Start what can start, one after the other, until that time; starts are not cut."""
        while self.time < end:
            if job := self._startable():
                self.start(job)
            else:
                self.pass_by(min(end, self._events[0][0] if self._events else end) - self.time)
                self.time += 0.0 if self._startable() else 1.0

    # ------------------------------------------------------------------------------------- jobs

    def _startable(self) -> QueuedJob | None:
        for job in self.jobs:
            waits = job.state == "PENDING" and job.begins <= self.time
            if waits and self.run_dir.path.exists() and len(self._free(job)) >= 2:
                return job
        return None

    def _free(self, job: QueuedJob) -> list[str]:
        used = {node for other in self.jobs if other.state != "PENDING" for node in other.nodes}
        used |= {ranks.nodes[i] for ranks in self.ranks for i in (0, 1) if ranks.status is None}
        used |= {node for process in self.processes for node in process.nodes}
        used |= {node for node, until in self.down.items() if until > self.time}
        return [node for node in NODES if node not in used and node not in job.excluded]

    def start(self, job: QueuedJob) -> None:
        """Run a start of the job until its supervisor has ended."""
        self.revived += [job.number] * job.is_canceled
        job.state, job.reason, job.preempt_time, job.end = "RUNNING", "None", "None", ""
        job.nodes, job.began, job.starts = tuple(self._free(job)[:2]), self.time, job.starts + 1
        mine = Process(job, job.starts, job.restarts, job.nodes, self.time + LONGEST_START)
        self.arm(job)
        variables = {"JOB_ID": str(job.number), "RESTART_COUNT": str(job.restarts)}
        variables["JOB_NODELIST"] = ",".join(job.nodes)
        self.processes.append(mine)
        status = self._supervised(mine, variables)
        self.processes.pop()
        for ranks in self.ranks:
            if ranks.process is mine:
                ranks.end((-9, -9), are_lost=True)
        if job.starts == mine.start and job.state in ("RUNNING", "COMPLETING"):
            usual = "COMPLETED" if status == 0 else "FAILED"
            self.conclude(job, job.end or usual)
        self.after_start(job, mine, status)
        if self.processes:
            self._export(self.processes[-1])

    def _export(self, process: Process) -> None:
        values = (process.job.number, process.restart, ",".join(process.nodes))
        for name, value in zip(("JOB_ID", "RESTART_COUNT", "JOB_NODELIST"), values, strict=True):
            os.environ[f"SLURM_{name}"] = str(value)

    def _supervised(self, mine: Process, variables: dict[str, str]) -> int | None:
        """The exit status; None if Slurm killed it. It starts again after other kills, as
        `launcher.slurm.batch_process` does."""
        parser = argparse.ArgumentParser()
        job_supervisor.add_arguments(parser)
        arguments = parser.parse_args([str(self.run_dir.path), "--log-level", "error"])
        num_short = 0
        while num_short < 3:
            began = self.time
            os.environ.update({f"SLURM_{name}": value for name, value in variables.items()})
            try:
                return exit_status_of(
                    partial(job_supervisor.run, arguments), report=self.errors.append
                )
            except Killed:
                if mine.is_killed:
                    return None
                mine.signals[:0], mine.received = mine.received, []
                self.counted += 1
                num_short = num_short + 1 if self.time - began < 60.0 else 0
                for ranks in self.ranks:  # their srun notices
                    if ranks.process is mine and ranks.status is None:
                        ranks.send_signal(signal.SIGUSR2)
        return KILLED_TOO_OFTEN

    def arm(self, job: QueuedJob) -> None:
        left = job.began + job.limit - self.time
        start, limit, job.is_warned = job.starts, job.limit, left >= WARNING

        def is_current() -> bool:
            return (job.starts, job.state, job.limit) == (start, "RUNNING", limit)

        self.later(left - WARNING, lambda: is_current() and self.signal(job, signal.SIGUSR1))
        self.later(left, lambda: is_current() and self.end(job, "TIMEOUT", "TIME LIMIT"))

    def signal(self, job: QueuedJob, number: int) -> None:
        for process in self.processes:
            if process.job is job:
                process.signals.append(number)

    def kill(self, job: QueuedJob, start: int) -> None:
        """Kill what is left of a start of the job."""
        for process in self.processes:
            if process.job is job and process.start == start:
                process.is_killed = True
        for ranks in self.ranks:
            if ranks.process.job is job and ranks.process.start == start:
                ranks.end((-9, -9), are_lost=True)
        if job.starts == start and job.state == "COMPLETING":
            self.conclude(job, job.end)

    def end(self, job: QueuedJob, how: str, notice: str, grace: float = KILL_WAIT) -> None:
        """Slurm ends the processes of a job, with a notice and some time."""
        if job.state != "RUNNING":
            return
        due = f" DUE TO {notice}" if notice else ""
        line = (
            f"slurmstepd: error: *** JOB {job.number} ON {job.nodes[0]} CANCELLED AT now{due} ***"
        )
        with contextlib.suppress(OSError), open(self.log_of(job), "a") as file:
            file.write(line + "\n")
        job.state, job.end = "COMPLETING", how
        job.reason = "TimeLimit" if how == "TIMEOUT" else job.reason
        self.signal(job, signal.SIGTERM)
        self.later(grace, partial(self.kill, job, job.starts))
        if how == "REQUEUED" or (how == "NODE_FAIL" and job.may_requeue):
            self.conclude(job, how)

    def conclude(self, job: QueuedJob, how: str) -> None:
        """The start has ended: the job waits for another one, or is over."""
        is_again = how in ("NODE_FAIL", "REQUEUED", "PREEMPTED") and job.may_requeue
        job.end, job.nodes, job.ended = how, (), self.time
        if is_again or how == "REQUEUED":
            job.state, job.restarts, job.reason = "PENDING", job.restarts + 1, "BeginTime"
            job.begins = self.time + 130.0
        else:
            job.state = how

    def log_of(self, job: QueuedJob) -> Path:
        return self.run_dir.logs / f"slurm-{job.number}.log"

    def kill_supervisor(self, job: QueuedJob) -> None:
        """Kill it alone: it starts again."""
        for process in self.processes:
            process.is_restarted |= process.job is job

    # ------------------------------------------------------------------------------------ ranks

    def start_ranks(self, new: Srun) -> None:
        for old in self.ranks:
            is_current = old.process.job.starts == old.process.start and not old.process.is_killed
            if old.status is None and is_current:
                self.overlaps.append(f"{new.token} starts while {old.token} trains")
        self.ranks.append(new)

    def ended_ranks(self, ranks: Srun) -> None:
        """Note what a supervisor may conclude from the end of these ranks."""
        kind = ENDS.get(ranks.plan, (0.0, (), ""))[2]
        if ranks.stops is None and self.saved_step == ranks.first:
            self.counted += kind in ("run", "refused", "steps")

    def _kill_ranks(self, _: int) -> None:
        for ranks in self.ranks:
            if ranks.process is self.processes[-1]:
                ranks.end((-9, -9), are_lost=True)

    def _popen(self, command: Sequence[str], **options: Any) -> Srun:
        return Srun(self, command, options.get("stdout"), options.get("env") or {})

    # ----------------------------------------------------------------------------- the controller

    @property
    def mood(self) -> str:
        self.moods = [(until, mood) for until, mood in self.moods if until > self.time]
        return self.moods[-1][1] if self.moods else ""

    def _run(self, command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[Any]:
        """What `subprocess.run` does with a command of Slurm."""
        mood, timeout = self.mood, how.get("timeout") or 120.0
        if mood in ("down", "late", "lost", "empty", "cut"):
            self.unanswered = self.time
        if mood == "late":
            self.pass_by(timeout)
            raise subprocess.TimeoutExpired(list(command), timeout)
        self.slow_answer = self.time if mood == "slow" else self.slow_answer
        self.pass_by(10.0 if mood == "slow" else 0.05)
        if mood == "down":
            status, out, err = 1, b"", NO_ANSWER
        else:
            status, out, err = self._answer(list(command))
        if mood == "lost":  # what was asked for is done, but nobody hears of it
            status, out, err = 1, b"", "error: Socket timed out on send/recv operation"
        elif mood == "banner":
            out = b"Welcome! Jobs on monday: 24\n24|down\n" + out + b"\nBye \xfc\n"
        elif mood in ("empty", "cut") and command[0] != "sbatch":
            out = out[: len(out) // 2] if mood == "cut" else b""
        is_strict = not how.get("encoding")
        text = out.decode("utf-8", errors="strict" if is_strict else how["errors"])
        return subprocess.CompletedProcess(list(command), status, text, err)

    def _answer(self, command: list[str]) -> tuple[int, bytes, str]:
        def option(name: str) -> str:
            return command[command.index(name) + 1]

        program, words = command[0], " ".join(command)
        if program == "sbatch":
            number = 24 + len(self.jobs)
            self.jobs.append(QueuedJob(number, str(Snapshot(self.run_dir.path.resolve()).code)))
            return 0, f"{number}\n".encode(), ""
        if program == "sinfo":
            names = [("main*", "6", "8", "(null)", "1-00:00:00")]
            if "-N" in command:
                names = [(node, "", "idle", "", "none") for node in option("-n").split(",")]
            fields = "PDcGl" if "-N" not in command else "N.T.E"
            return self._listed(command, [dict(zip(fields, each, strict=True)) for each in names])
        if program == "sacct":
            between = next(c for c in command if c.startswith("--delimiter")).split("=")[1]
            rows = [("JobID", "State", "WorkDir")]
            rows += [(str(j.number), j.end or j.state, j.work_dir) for j in self._asked(words)]
            return 0, "".join(between.join((*row, "\n")) for row in rows).encode(), ""
        if program == "squeue" and "-s" in command:
            steps = [
                r for r in self.ranks if r.status is None and r.process.job in self._asked(words)
            ]
            rows = [{"i": f"{each.process.job.number}.0"} for each in steps]
            return self._listed(command, rows)
        if program == "squeue":
            mine = self._asked(words) if "-j" in command else self.jobs
            return self._listed(command, [self._row(job) for job in mine if self._is_shown(job)])
        number = re.search(r"\b(\d+)(\.0)?$|JobId=(\d+)", words)
        asked = [job for job in self.jobs if number and str(job.number) in number.groups()]
        if not asked or not self._is_shown(asked[0]):
            return 1, b"", "scontrol: error: Invalid job id specified"
        return self._told(asked[0], command)

    def _told(self, job: QueuedJob, command: list[str]) -> tuple[int, bytes, str]:
        """Do, or show, what scontrol or scancel are asked."""
        if command[0] == "scancel" and "." in command[1]:
            for ranks in self.ranks:
                if ranks.process.job is job:
                    ranks.end((-15, -15))
        elif command[0] == "scancel":
            self.cancel(job)
        elif command[1] == "requeue":
            if job.state not in ("RUNNING", "COMPLETING") or not job.may_requeue:
                return 1, b"", "Requested operation is presently disabled"
            if job.state == "COMPLETING":  # beyond its time limit
                self.conclude(job, "REQUEUED")
            self.end(job, "REQUEUED", "JOB REQUEUE")
        elif command[1] == "update":
            job.excluded = tuple(command[-1].partition("=")[2].split(","))
        else:
            return 0, self._shown(job), ""
        return 0, b"", ""

    def cancel(self, job: QueuedJob) -> None:
        # Without its log nothing tells a canceled job from a preempted one.
        is_told = self.log_of(job).parent.exists() or job.state != "RUNNING"
        job.is_canceled |= is_told and job.state in ("RUNNING", "PENDING", "REQUEUE_HOLD")
        if job.state == "RUNNING":
            self.end(job, "CANCELLED", "")
        elif job.state in ("PENDING", "REQUEUE_HOLD"):
            are_ending = any(
                ranks.process.job is job and ranks.status is None for ranks in self.ranks
            )
            job.end = "CANCELLED"
            job.state = "COMPLETING" if are_ending else "CANCELLED"  # as it was requeued

    def _asked(self, words: str) -> list[QueuedJob]:
        numbers = re.search(r"-j ([\d,_]+)", words)
        return [job for job in self.jobs if numbers and str(job.number) in numbers[1].split(",")]

    def _is_shown(self, job: QueuedJob) -> bool:
        return job.is_live or self.time - job.ended < 300.0

    def _row(self, job: QueuedJob) -> dict[str, str]:
        start = self._date(job.began) if job.nodes else "N/A"
        number, nodes = str(job.number), ",".join(job.nodes)
        own = (job.state, job.reason, nodes, start, job.work_dir, job.name)
        values = (number, number, "N/A", *own)
        return dict(zip("AFKTrNSZj", values, strict=True))

    def _listed(self, command: list[str], rows: Sequence[dict[str, str]]) -> tuple[int, bytes, str]:
        form = command[command.index("-o") + 1]
        heads = [] if "-h" in command else [_FIELD.sub("HEAD", form)]
        lines = [_FIELD.sub(lambda field, row=row: row.get(field[1], ""), form) for row in rows]
        return 0, "".join(f"{line}\n" for line in [*heads, *lines]).encode(), ""

    def _date(self, when: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(EPOCH + when))

    def _shown(self, job: QueuedJob) -> bytes:
        """What `scontrol show job` prints."""
        minutes, begins = int(job.limit // 60), self._date(job.began) if job.nodes else "Unknown"
        lines = [
            f"JobId={job.number} JobName={job.name}",
            f"JobState={job.state} Reason={job.reason} Dependency=(null)",
            f"Requeue={int(job.may_requeue)} Restarts={job.restarts} BatchFlag=1 ExitCode=0:0",
            f"RunTime=00:00:01 TimeLimit=00:{minutes:02}:00 TimeMin=N/A",
            f"StartTime={begins} EndTime=Unknown Deadline=N/A",
            f"PreemptEligibleTime={begins} PreemptTime={job.preempt_time}",
            f"Partition=main ReqNodeList=(null) ExcNodeList={','.join(job.excluded) or '(null)'}",
            f"NodeList={','.join(job.nodes)} BatchHost={next(iter(job.nodes), '')}",
            f"AdminComment=JobState=FAILED {job.comment.decode('latin-1')}",
            f"Command={job.work_dir}/../job.sbatch",
            f"WorkDir={job.work_dir}",
            f"StdErr={self.log_of(job)} StdIn=/dev/null StdOut={self.log_of(job)}",
        ]
        return "\n   ".join(lines).encode("latin-1") + b"\n\n"

    # ---------------------------------------------------------------------------------- storage

    def take_storage_away(self, seconds: float) -> None:
        away = self.away.path
        if self.run_dir.path.exists() and not away.exists():
            self.run_dir.path.rename(away)

            def bring_back() -> None:
                shutil.rmtree(self.run_dir.path, ignore_errors=True)
                away.rename(self.run_dir.path)
                self.storage_back = self.time

            self.later(seconds, bring_back)

    def remove_logs(self) -> None:
        for entry in self.run_dir.logs.glob("*"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
