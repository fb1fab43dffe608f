"""Runs of the real trainer in the lab: submitted with `launcher submit`, disturbed by tests,
compared afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pretrain.checkpoint.directory import steps_on_disk
from pretrain.rundir.attempt_files import ATTEMPT_FILES
from pretrain.rundir.compare_runs import difference_lines, differing_losses
from pretrain.rundir.events import (
    AttemptEnded,
    Event,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    Outcome,
    TrainingBegan,
    TrainingEnded,
)
from pretrain.rundir.history import find_events, last_event
from pretrain.rundir.run_dir import RunDir
from tests.slurm.lab import SlurmLab

E = TypeVar("E", bound=Event)
STEPS, INTERVAL = 300, 60
NODES, RANKS_PER_NODE = 2, 2
EXPERIMENT = """name: tiny
model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 16, dropout: 0.1}}
data: {{path: {corpus}, lanes: 8, segment_length: 8}}
optim: {{steps: {steps}}}
engine: {{zero_stage: 1}}
checkpoint: {{interval: {interval}}}
evaluation: {{interval: 0, max_tokens: 500}}
metrics: {{interval: 1, tensorboard: false}}
"""
# Where a run has to stay.
NEAR, FAR = ({"options": {"nodelist": nodes}} for nodes in ("n1,n2", "n3,n4"))
CLUSTER = {"ranks_per_node": RANKS_PER_NODE, "signal_seconds": 10, "time_limit": "1:00:00"}


class Runs:
    """Submits runs of one experiment, each into its own directory."""

    def __init__(self, lab: SlurmLab, corpus: Path) -> None:
        self.lab = lab
        self.path = lab.path / "runs"
        self.path.mkdir()
        self.experiment = self.path / "tiny.yaml"
        self.experiment.write_text(EXPERIMENT.format(corpus=corpus, steps=STEPS, interval=INTERVAL))

    def command(self, name: str, *more: str, nodes: str = str(NODES), **cluster: Any) -> list[str]:
        """The command line that submits the run `name` to the cluster, with changes to its file."""
        usual = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        cluster["environment"] = {**usual, **cluster.get("environment", {})}
        file = self.path / f"{name}.cluster.yaml"
        file.write_text(json.dumps({**CLUSTER, **cluster}))  # JSON is YAML
        command = [sys.executable, "-m", "launcher", "submit", str(self.experiment)]
        where = [f"--cluster={file}", f"--nodes={nodes}", f"--run-dir={self.path / name}"]
        return [*command, *where, *more]

    def try_submit(self, name: str, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Submit a run that may be refused."""
        return self.lab.run(*self.command(name, *more, **options))

    def submit(self, name: str, *more: str, **options: Any) -> SlurmRun:
        """Submit a run; its job waits or runs when this returns."""
        result = self.try_submit(name, *more, **options)
        assert result.returncode == 0, result.stderr
        return self.submitted(name, result)

    def submitted(self, name: str, result: subprocess.CompletedProcess[str]) -> SlurmRun:
        """The run that a command has submitted."""
        return SlurmRun(self.lab, self.path / name, job=result.stdout.split()[1])


class SlurmRun:
    """A submitted run."""

    def __init__(self, lab: SlurmLab, path: Path, job: str) -> None:
        self.lab = lab
        self.dir = RunDir(path)
        self.job = job

    def until(self, condition: Callable[[], object], seconds: float = 500) -> None:
        """Wait for the condition; fail with all logs after a timeout."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"timed out\n{self.logs()}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: self.last_step() >= step)

    def wait_for_checkpoint(self, step: int) -> None:
        """Until it is published: on a busy machine the next one may come before a test goes on."""
        self.until(lambda: step in self.published())

    def wait_for_end(self, reason: JobEndReason, count: int = 1) -> None:
        """Until `count` starts of the job have ended for this reason."""
        self.until(lambda: [end.reason for end in self.events(JobEnded)].count(reason) >= count)

    def wait_until_finished(self) -> None:
        self.wait_for_end(JobEndReason.FINISHED)

    def last_step(self) -> int:
        return max((line["step"] for line in self.dir.read_metrics()), default=0)

    def events(self, *kinds: type[E]) -> list[E]:
        return find_events(self.dir.ledger.read(), *kinds)

    def ends(self) -> list[str]:
        """Why each start of the job ended."""
        return [event.cause for event in self.events(JobEnded)]

    def attempts(self) -> list[NextAction]:
        """What followed each attempt."""
        return [event.next for event in self.events(AttemptEnded)]

    def ended_at(self, outcome: Outcome) -> list[int]:
        """The step after which each attempt with this outcome ended."""
        return [event.step for event in self.events(TrainingEnded) if event.outcome is outcome]

    def begun_at(self) -> list[int]:
        """The step from which each attempt continued."""
        return [event.step for event in self.events(TrainingBegan)]

    def log(self) -> str:
        """The supervisor's log, all starts together."""
        path = self.dir.logs / f"slurm-{self.job}.log"
        return path.read_text() if path.exists() else ""

    def state(self) -> str:
        """The job's state as Slurm reports it."""
        return self.lab.run("squeue", "-h", "-t", "all", "-j", self.job, "-o", "%T").stdout.strip()

    def nodes(self) -> tuple[str, ...]:
        """Where the last start of the job runs."""
        return self.events(JobStarted)[-1].nodes

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """To the rank's own process, at once, wherever in the lab it runs."""
        os.kill(self.process_of(rank), number)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step is made in the block: the last rank is stopped, the others wait for it."""
        last = self.process_of(self._num_ranks() - 1)
        os.kill(last, signal.SIGSTOP)
        yield
        with contextlib.suppress(ProcessLookupError):  # where the block ended the attempt
            os.kill(last, signal.SIGCONT)

    def kill_while_saving(self) -> None:
        """SIGKILL to rank 0 in the middle of writing a checkpoint: begun, not published."""
        victim = self.process_of(0)
        while True:
            before = self.published()
            while not list(self.dir.checkpoints.glob(".partial-*")):
                time.sleep(0.0005)
            os.kill(victim, signal.SIGSTOP)
            if list(self.dir.checkpoints.glob(".partial-*")) and self.published() == before:
                os.kill(victim, signal.SIGKILL)
                return
            os.kill(victim, signal.SIGCONT)  # too late for this one

    def assert_same_as(self, other: SlurmRun) -> None:
        """Every step there once, every loss the same in every bit."""
        print(f"\n{self.dir.path.name}\n{self.timeline()}")  # shown by pytest -s
        steps = [line["step"] for line in self.dir.read_metrics() if line["kind"] == "train"]
        assert steps == list(range(1, STEPS + 1))
        problems = differing_losses(other.dir, self.dir)
        assert not problems, difference_lines(problems)

    def published(self) -> list[int]:
        return steps_on_disk(self.dir.checkpoints)

    def _num_ranks(self) -> int:
        began = last_event(self.dir.ledger.read(), TrainingBegan)
        assert began is not None
        return began.world_size

    def process_of(self, rank: int) -> int:
        """Its id as seen from outside of the lab, in the newest attempt: on a host that was cut off
        ranks of the one before may still run.
        """
        process_of_attempt: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if words[2:4] != ["pretrain", "train"] or str(self.dir.path) not in words:
                    continue
                lines = (entry / "environ").read_bytes().decode().split("\0")
                variables = dict(line.split("=", 1) for line in lines if "=" in line)
                if variables.get("RANK") == str(rank):
                    process_of_attempt[_attempt_of(variables)] = int(entry.name)
        assert process_of_attempt, f"rank {rank} does not run\n{self.logs()}"
        return process_of_attempt[max(process_of_attempt)]

    def timeline(self) -> str:
        """The ledger, a line per event, with the seconds since the first one."""
        events = self.dir.ledger.read()
        return "\n".join(f"{event.time - events[0].time:8.1f}  {event}" for event in events)

    def logs(self) -> str:
        """Everything that could explain a failure."""
        files = sorted(self.dir.logs.glob("*.log"))
        shown = [f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files]
        return "\n".join([*shown, self.timeline(), self.lab.run("squeue").stdout])


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _attempt_of(variables: Mapping[str, str]) -> int:
    """The number of the attempt that a rank with these environment variables belongs to."""
    return int(Path(variables[ATTEMPT_FILES]).name.removeprefix("attempt-"))


def status(run: SlurmRun) -> dict[str, Any]:
    """What `launcher status` says of the run."""
    command = [sys.executable, "-m", "launcher", "status", str(run.dir.path), "--json"]
    return json.loads(run.lab.run(*command).stdout)


def assert_status(run: SlurmRun, state: str, **expected: object) -> None:
    shown = status(run)
    assert shown["state"] == state, shown
    assert {key: shown[key] for key in expected} == expected, shown
