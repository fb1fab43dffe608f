"""What tests of supervisors, jobs and their history start from."""

import datetime
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.slurm.client import Slurm
from launcher.slurm.job_exit import ThisJob
from launcher.slurm.sbatch import Job
from pretrain.checkpoint.storage_retry import Clock
from pretrain.config.cluster import ClusterConfig, NodeRange
from pretrain.rundir.events import AttemptEnded, AttemptReason, Event, NextAction
from pretrain.rundir.run_dir import RunDir

THIS_JOB = ThisJob(id="7", number=7, restart=0, nodes=("n1", "n2"))


def attempt_ended(then: NextAction = NextAction.RETRY, **more: Any) -> AttemptEnded:
    """Rank 1 was killed, and the run has got no further than step 10."""
    usual = {"statuses": (1, -9), "first_failure": 1, "step_before": 10, "step": 10}
    usual |= {"attempt_number": 0, "reason": AttemptReason.RANK_FAILED}
    return AttemptEnded(next=then, **{**usual, **more})


def write_ledger(run_dir: RunDir, *events: Event) -> None:
    """Write them with their own times."""
    lines = []
    for event in events:
        run_dir.ledger.path.unlink(missing_ok=True)
        run_dir.ledger.append(event)
        when = datetime.datetime.fromtimestamp(event.time, datetime.timezone.utc).isoformat()
        lines.append(json.dumps({**json.loads(run_dir.ledger.path.read_text()), "time": when}))
    run_dir.ledger.path.write_text("\n".join(lines) + "\n")


def job_of(
    run_dir: Path,
    cluster: ClusterConfig,
    nodes: NodeRange = NodeRange(2, 2),  # noqa: B008  (frozen)
    python: str = "/bin/echo",
) -> Job:
    """The job of the run in this directory."""
    code = run_dir / "slurm" / "code"
    more = {"python": python, "nodes": nodes, "cluster": cluster, "attempts_without_progress": 3}
    return Job(name="books-12345678", run_dir=run_dir, code=code, **more)


def fake_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **lines: str) -> None:
    """Put commands of Slurm before all others in PATH, each of these lines of bash."""
    for name, text in lines.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def scripted(*answers: str | subprocess.CompletedProcess[str]) -> Slurm:
    """A Slurm that gives these answers, one after the other, and the last one for ever."""
    left = list(answers)

    def run(command: Sequence[str], _: float) -> subprocess.CompletedProcess[str]:
        answer = left.pop(0) if left[1:] else left[0]
        if isinstance(answer, str):
            return subprocess.CompletedProcess(command, 0, answer, "")
        return answer

    return Slurm(run, PassingClock())


class PassingClock(Clock):
    """Time passes only while somebody sleeps, and then at once."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def records(*lines: str, fields: int = 8) -> str:
    """What squeue or sinfo prints: a header and these records."""
    header = "|".join(["HEAD"] * fields)
    return "".join(f"xl|{line}|lx\n" for line in (header, *lines))


def listed(*records: str, fields: int = 8) -> str:
    """Lines of bash that print what squeue or sinfo lists: a header and these records."""
    lines = ["|".join(["HEAD"] * fields), *records]
    return "\n".join(f"echo 'xl|{line}|lx'" for line in lines)


def until(condition: Callable[[], object], seconds: float = 600.0) -> None:
    """Wait for the condition; fail after a timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
