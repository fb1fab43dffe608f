"""Runs of the real trainer in the lab: submitted with `launcher submit`, disturbed by tests, compared afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pretrain.checkpoint.directory import steps_on_disk
from pretrain.commands.same_run import differing_losses, summary
from pretrain.rundir.goodput import time_of
from pretrain.rundir.run_dir import RunDir
from tests.slurm.lab import SlurmLab

STEPS, INTERVAL = 300, 60
NODES, RANKS_PER_NODE = 2, 2
EXPERIMENT = """name: tiny
model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 16, dropout: 0.1}}
data: {{path: {corpus}, lanes: 8, segment_length: 8}}
optim: {{steps: {steps}}}
engine: {{zero_stage: 1, threads: 1}}
checkpoint: {{interval: {interval}}}
evaluation: {{interval: 0, max_tokens: 500}}
recovery: {{straggler_ratio: 0}}
metrics: {{interval: 1, tensorboard: false}}
"""
NEAR, FAR = (
    {"options": {"nodelist": "n1,n2"}},
    {"options": {"nodelist": "n3,n4"}},
)  # where a run has to stay
CLUSTER = {"ranks_per_node": RANKS_PER_NODE, "signal_seconds": 10, "time_limit": "1:00:00"}


class Runs:
    """Submits runs of one experiment, each into a directory of its own."""

    def __init__(self, lab: SlurmLab, corpus: Path) -> None:
        self.lab = lab
        self.path = lab.path / "runs"
        self.path.mkdir()
        self.experiment = self.path / "tiny.yaml"
        self.experiment.write_text(EXPERIMENT.format(corpus=corpus, steps=STEPS, interval=INTERVAL))

    def command(self, name: str, *more: str, nodes: str = str(NODES), **cluster: Any) -> list[str]:
        """The command line that submits the run `name` to the cluster, with changes to its file."""
        environment = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            **cluster.pop("environment", {}),
        }
        file = self.path / f"{name}.cluster.yaml"
        file.write_text(
            json.dumps({**CLUSTER, **cluster, "environment": environment})
        )  # JSON is YAML
        command = [
            sys.executable,
            "-m",
            "launcher",
            "submit",
            str(self.experiment),
            f"--cluster={file}",
        ]
        return [*command, f"--nodes={nodes}", f"--run-dir={self.path / name}", *more]

    def try_submit(self, name: str, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Submit a run that may be refused."""
        return self.lab.run(*self.command(name, *more, **options))

    def submit(self, name: str, *more: str, **options: Any) -> SlurmRun:
        """Submit a run; its job waits or runs when this returns."""
        result = self.try_submit(name, *more, **options)
        assert result.returncode == 0, result.stderr
        return SlurmRun(self.lab, self.path / name, job=result.stdout.split()[1])


class SlurmRun:
    """A submitted run."""

    def __init__(self, lab: SlurmLab, path: Path, job: str) -> None:
        self.lab = lab
        self.dir = RunDir(path)
        self.job = job

    def until(self, condition: Callable[[], object], seconds: float = 500) -> None:
        """Wait; what all logs say is shown if it was in vain."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain\n{self.logs()}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: self.last_step() >= step)

    def wait_for_end(self, why: str, count: int = 1) -> None:
        """Until the job ended for this reason so many times."""
        self.until(lambda: len([end for end in self.ends() if end == why]) >= count)

    def wait_until_finished(self) -> None:
        self.until(lambda: "finished" in self.ends())

    def last_step(self) -> int:
        return max((line["step"] for line in self.dir.read_metrics()), default=0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.dir.read_ledger() if event["event"] == kind]

    def ends(self) -> list[str]:
        """Why each start of the job ended."""
        return [event["why"] for event in self.events("job_ended")]

    def attempts(self) -> list[str]:
        """What followed each attempt."""
        return [event["next"] for event in self.events("attempt_ended")]

    def begun_at(self) -> list[int]:
        """The step at which each attempt went on."""
        return [
            event["step"]
            for event in self.dir.read_ledger()
            if event["event"] in ("start", "resume")
        ]

    def log(self) -> str:
        """What the job's supervisor said, all starts together."""
        path = self.dir.logs / f"slurm-{self.job}.log"
        return path.read_text() if path.exists() else ""

    def state(self) -> str:
        """Slurm's word for the job."""
        return self.lab.run("squeue", "-h", "-t", "all", "-j", self.job, "-o", "%T").stdout.strip()

    def hosts(self) -> list[str]:
        """Where the last start of the job runs."""
        return self.events("job_started")[-1]["hosts"]

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """To the rank's own process, at once, wherever in the lab it runs."""
        os.kill(self._process_of(rank), number)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step is made in the block: the last rank is stopped, the others wait for it."""
        rank = self._num_ranks() - 1
        self.signal_rank(rank, signal.SIGSTOP)
        yield
        self.signal_rank(rank, signal.SIGCONT)

    def kill_while_saving(self) -> None:
        """SIGKILL to rank 0 in the middle of writing a checkpoint: begun, not published."""
        victim = self._process_of(0)
        while True:
            before = self._published()
            while not list(self.dir.checkpoints.glob(".partial-*")):
                time.sleep(0.0005)
            os.kill(victim, signal.SIGSTOP)
            if list(self.dir.checkpoints.glob(".partial-*")) and self._published() == before:
                os.kill(victim, signal.SIGKILL)
                return
            os.kill(victim, signal.SIGCONT)  # too late for this one

    def assert_same_as(self, other: SlurmRun) -> None:
        """Every step there once, every loss the same in every bit."""
        print(f"\n{self.dir.path.name}\n{self.timeline()}")  # shown by pytest -s
        steps = [line["step"] for line in self.dir.read_metrics() if line["kind"] == "train"]
        assert steps == list(range(1, STEPS + 1))
        problems = differing_losses(other.dir, self.dir)
        assert not problems, summary(problems)

    def _published(self) -> list[int]:
        return steps_on_disk(self.dir.checkpoints)

    def _num_ranks(self) -> int:
        return len(list(self.dir.heartbeats.glob("rank-*.json")))

    def _process_of(self, rank: int) -> int:
        """Its id as seen from outside of the lab."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                is_rank = words[1:4] == ["-m", "pretrain", "train"] and str(self.dir.path) in words
                if is_rank and f"\0RANK={rank}\0" in (entry / "environ").read_bytes().decode():
                    return int(entry.name)
        raise AssertionError(f"rank {rank} does not run\n{self.logs()}")

    def timeline(self) -> str:
        """The journal, a line each, with the seconds since the first event."""
        events = self.dir.read_ledger()
        times = [time_of(event) for event in events]
        told = [{key: value for key, value in event.items() if key != "time"} for event in events]
        return "\n".join(
            f"{time - times[0]:8.1f}  {event}" for time, event in zip(times, told, strict=True)
        )

    def logs(self) -> str:
        """Everything that could explain a failure."""
        files = sorted(self.dir.logs.glob("*.log"))
        shown = [f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files]
        return "\n".join([*shown, self.timeline(), self.lab.run("squeue").stdout])
