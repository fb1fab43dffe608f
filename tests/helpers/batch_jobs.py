"""A `launcher batch` whose site is scripted: Slurm's answers, the ranks, the nodes and the time."""

import argparse
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import exit_status_of
from launcher.slurm import job_supervisor
from launcher.slurm.client import Slurm
from launcher.slurm.job_supervisor import Site
from launcher.slurm.sbatch import Snapshot
from launcher.slurm.srun import Probe, Step
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import CheckpointConfig, RunConfig
from pretrain.rundir.events import Event, JobEnded
from pretrain.rundir.run_dir import RunDir
from tests.helpers.jobs import PassingClock, records

PATIENCE = 600.0
BEGAN = "2026-11-21T07:57:00"


@dataclass
class ScriptedRanks:
    """Ranks that end at once."""

    statuses: Sequence[int]
    first_failure: int | None = None
    was_stopped: bool = False
    needs_new_start: bool = False
    failed_nodes: Sequence[str] = ()
    logs: list[Path] = field(default_factory=list)

    def wait(self, *, meanwhile: Callable[[], None]) -> Sequence[int]:
        meanwhile()
        failed = [rank for rank, status in enumerate(self.statuses) if status]
        self.first_failure = failed[-1] if failed else None
        return self.statuses

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def describe_failure(self, statuses: Sequence[int]) -> str:
        return f"they ended with {statuses}"


class BatchJob:
    """Job 7 on the nodes n1 and n2 of four. Set what its Slurm answers, then `run` it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = RunDir.create(folder / "run", RunConfig())
        patient = RunConfig(checkpoint=CheckpointConfig(storage_patience_seconds=PATIENCE))
        Snapshot(self.run_dir.path).take_settings(patient, ClusterConfig(ranks_per_node=1))
        self.restart, self.clock = 0, PassingClock()
        self.queue: list[str] = []  # records of squeue
        self.fields: dict[str, str] = {}  # of the job, other than usual
        self.commands: list[str] = []
        # Answers that are lost: (command, whether it is done, what the job is then).
        self.lost: list[tuple[str, bool, dict[str, str]]] = []
        self.nodes_of_steps: list[tuple[str, ...]] = []
        self.num_written = 0
        self._monkeypatch = monkeypatch

    def write(self, *events: Event) -> None:
        """Write what happened before."""
        for event in events:
            self.run_dir.ledger.append(event)
        self.num_written += len(events)

    def new_events(self) -> list[str]:
        """What the job has written: the reasons of its ends, the kinds of other events."""
        new = self.run_dir.ledger.read()[self.num_written :]
        return [e.reason.value if isinstance(e, JobEnded) else type(e).__name__ for e in new]

    def run(
        self,
        *options: str,
        statuses: Sequence[Sequence[int]] = (),
        probe: Callable[[float], dict[str, str]] = lambda now: {},
        **more: Any,
    ) -> int:
        """The exit status. `statuses` of one attempt after the other, the last for all further;
        `probe(seconds)`: the problems of nodes; `more`: of ScriptedRanks."""
        variables = {"JOB_ID": "7", "RESTART_COUNT": str(self.restart), "JOB_NODELIST": "n[1-2]"}
        for name, value in variables.items():
            self._monkeypatch.setenv(f"SLURM_{name}", value)
        left = list(statuses)

        def start_ranks(step: Step, *_: object) -> Any:
            self.nodes_of_steps.append(step.nodes)
            return ScriptedRanks(left.pop(0) if left[1:] else left[0], **more)

        site = Site(
            slurm=Slurm(self._answer, self.clock),
            start_ranks=start_ranks,
            probe=lambda *_: Probe(probe(self.clock.time)),
            clock=self.clock,
        )
        parser = argparse.ArgumentParser()
        job_supervisor.add_arguments(parser)
        arguments = parser.parse_args([str(self.run_dir.path), *options])
        return exit_status_of(lambda: job_supervisor.run(arguments, site))

    def _answer(self, command: Sequence[str], _: float) -> subprocess.CompletedProcess[str]:
        if self.lost and " ".join(command).startswith(self.lost[0][0]):
            is_done, fields = self.lost.pop(0)[1:]
            if is_done:
                self._answer(command, 0.0)
            self.fields |= fields
            return subprocess.CompletedProcess(command, 1, "", "Socket timed out on send/recv")
        self.commands.append(" ".join(command[:3]))
        usual = {"JobState": "RUNNING", "PreemptTime": "None", "Restarts": str(self.restart)}
        usual |= {"StartTime": BEGAN, "NodeList": "n[1-2]", "Partition": "main", "Requeue": "1"}
        if command[:2] == ["scontrol", "requeue"]:
            self.fields |= {"JobState": "PENDING", "Restarts": str(self.restart + 1)}
        if command[0] == "scontrol":
            fields = "".join(f"   {k}={v}\n" for k, v in {**usual, **self.fields}.items())
            return subprocess.CompletedProcess(command, 0, f"JobId=7\n{fields}   WorkDir=/x\n", "")
        if command[0] == "sinfo":
            return subprocess.CompletedProcess(command, 0, records("main*|4|8|x|1", fields=5), "")
        listed = records(fields=1) if "-s" in command else records(*self.queue)
        return subprocess.CompletedProcess(command, 0, listed, "")
