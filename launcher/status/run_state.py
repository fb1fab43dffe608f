"""How a run stands, read from its directory alone: journal, measurements, checkpoints, locks, signs of life.

Reads; locks and changes nothing. `launcher/status/queue_state.py` joins what Slurm knows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config_loader import load_config
from launcher.slurm.snapshot import Snapshot
from launcher.status.journal import (
    last_failure,
    last_job,
    last_of,
    num_attempts,
    without_refused_jobs,
)
from launcher.status.liveness import read_beats, read_lock, read_measured
from launcher.status.run_status import Evidence, goodput, judge
from pretrain.checkpoint.directory import MARKER, step_directory, steps_on_disk
from pretrain.config.phases import tokens_of_steps
from pretrain.config.run import RunConfig
from pretrain.rundir.run_dir import RunDir

LOCKS = ("launcher.lock", "train.lock")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One row of `launcher status`; unknown numbers are None, ages and spans are seconds."""

    name: str
    path: str
    state: (
        str  # new, queued, running, requeued, preempted, stopped, cancelled, silent, failed, done
    )
    why: str = ""
    attempts: int = 0
    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    job: str | None = None  # Slurm's id
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    goodput: float | None = None
    seconds_left: float | None = None
    checkpoint: int | None = None
    checkpoint_age: float | None = None
    last_failure: str = ""
    last_failure_age: float | None = None

    @property
    def done_share(self) -> float:
        """How much of the run is behind it, 0 to 1."""
        return min(1.0, self.step / self.steps) if self.steps else 0.0

    @property
    def describe(self) -> str:
        """The state and, where there is more to say, why."""
        return f"{self.state}: {self.why}" if self.why else self.state


def is_run(path: Path) -> bool:
    """Whether a run was begun here, or submitted and waits for its first attempt."""
    return RunDir(path).exists() or Snapshot(path).experiment.is_file()


def read_state(path: Path) -> RunState:
    """How the run of this directory stands now; ConfigError if it holds none."""
    config = config_of_run(path)
    evidence = gather(RunDir(path), config.optim.steps)
    state, why = judge(evidence)
    speed, left = evidence.measured.tokens_per_second, None
    if speed and state == "running":
        left = tokens_of_steps(config, range(evidence.newest_step, config.optim.steps)) / speed
    failure = last_failure(evidence.ledger)
    return RunState(
        name=config.name,
        path=str(path),
        state=state,
        why=why,
        attempts=num_attempts(evidence.ledger, is_running=state == "running"),
        ranks=next(
            (event["world_size"] for event in reversed(evidence.ledger) if "world_size" in event),
            None,
        ),
        hosts=_hosts(evidence),
        job=last_job(evidence.ledger),
        step=evidence.newest_step,
        steps=evidence.steps,
        loss=evidence.measured.loss,
        tokens_per_second=speed,
        goodput=goodput(evidence, is_running=state == "running"),
        seconds_left=left,
        checkpoint=evidence.checkpoint,
        checkpoint_age=None
        if evidence.checkpoint_time is None
        else max(0.0, evidence.now - evidence.checkpoint_time),
        last_failure=failure[0] if failure else "",
        last_failure_age=evidence.now - failure[1] if failure else None,
    )


def config_of_run(path: Path) -> RunConfig:
    """A run's settings, or those it was submitted with if it has not begun; ConfigError if there is no run."""
    submitted = Snapshot(path).experiment
    if submitted.is_file() and not RunDir(path).exists():
        return load_config(RunConfig, submitted)
    return RunDir.open(path).config


def gather(run_dir: RunDir, steps: int) -> Evidence:
    """Read all that a verdict and the numbers need."""
    published = steps_on_disk(run_dir.checkpoints)
    newest = published[-1] if published else None
    return Evidence(
        now=time.time(),
        ledger=without_refused_jobs(run_dir.read_ledger()),
        measured=read_measured(run_dir.metrics),
        beats=read_beats(run_dir.heartbeats),
        locks=[lock for name in LOCKS if (lock := read_lock(run_dir.path / name))],
        checkpoint=newest,
        checkpoint_time=None
        if newest is None
        else _written(step_directory(run_dir.checkpoints, newest)),
        steps=steps,
    )


def _hosts(evidence: Evidence) -> tuple[str, ...]:
    started = last_of(evidence.ledger, "job_started")
    beats = {beat.host for beat in evidence.beats}
    return tuple(sorted(beats)) or tuple(started["hosts"] if started else ())


def _written(checkpoint: Path) -> float | None:
    try:
        return (checkpoint / MARKER).stat().st_mtime
    except FileNotFoundError:  # it is being pruned
        return None
