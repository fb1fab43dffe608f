"""The state of a run, a row of `launcher status`, read from its directory.

`slurm_queue.py` adds what Slurm knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foundation.settings import load_config
from launcher.slurm.snapshot import Snapshot
from launcher.status.infer_status import ACTIVE, Evidence, State, gather, infer_status
from pretrain.config.phases import tokens_of_steps
from pretrain.config.run import RunConfig
from pretrain.reporting.results import RunResults, results_of
from pretrain.rundir.events import (
    Event,
    JobEnded,
    JobStarted,
    Mirrored,
    NodeReplaced,
    Restored,
    Submitted,
    TrainingBegan,
)
from pretrain.rundir.ledger import (
    events_of,
    interruptions,
    job_names,
    last_of,
    last_stored,
    num_attempts,
)
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.time_spent import TimeSpent


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Unknown numbers are None; ages and spans are seconds."""

    name: str
    path: str
    state: State
    reason: str = ""
    is_lost: bool = False  # failed, and nothing of the run has written why
    needs_resume: bool = False  # nobody continues it, although its state would let one expect so
    is_job_open: bool = False  # its last job began and has not written its end
    attempts: int = 0
    ranks: int | None = None
    nodes: tuple[str, ...] = ()
    replaced_nodes: tuple[str, ...] = ()  # those that a spare node replaced, and why
    job: str | None = None  # Slurm's id
    job_names: Sequence[str] = ()  # under which it was submitted
    step: int = 0
    steps: int = 0
    results: RunResults = field(default_factory=RunResults)
    evaluation: Mapping[str, Any] | None = None  # the latest one's line in metrics.jsonl
    time_spent: TimeSpent | None = None
    recent_tokens_per_second: float | None = None  # `speeds`
    seconds_left: float | None = None
    checkpoint: int | None = None
    checkpoint_age: float | None = None
    mirrored: int | None = None  # the latest step that checkpoint.mirror has
    mirror_problem: str = ""  # why it has not the one after
    last_failure: str = ""
    last_failure_age: float | None = None
    interval: int = 0  # of checkpoints, in steps

    @property
    def fraction_done(self) -> float:
        return min(1.0, self.step / self.steps) if self.steps else 0.0

    @property
    def is_done(self) -> bool:
        """Whether all steps are made and there is a valid checkpoint of the last one."""
        return self.state is State.DONE and (self.checkpoint or 0) >= self.steps

    @property
    def unsaved(self) -> str:
        """How far a restart would go back, if that is more than an interval or the run is done.

        Measurements outlive checkpoints: those may be refused, or lost.
        """
        saved = self.checkpoint or 0
        if self.step - saved <= (0 if self.state is State.DONE else self.interval):
            return ""
        latest = f"only step {saved:,}" if saved else "no step"
        return f"{latest} of {self.step:,} is saved"

    @property
    def is_active(self) -> bool:
        """Whether the run is running, or will be without anybody's help."""
        return self.state in ACTIVE and not self.needs_resume

    @property
    def tree(self) -> dict[str, Any]:
        """What is known of the run, as JSON has it."""
        tree = asdict(self)
        results = tree.pop("results")
        return {**tree, **results, "fraction_done": self.fraction_done}

    @property
    def description(self) -> str:
        """The state and, where there is one, the reason."""
        return f"{self.state}: {self.reason}" if self.reason else str(self.state)


def is_run(path: Path) -> bool:
    """Whether this directory holds a run, or one that was submitted and waits for its first
    attempt."""
    return RunDir(path).exists() or Snapshot(path).experiment.is_file()


def read_state(path: Path) -> RunState:
    """The state of the run in this directory now; ConfigError if there is none."""
    config = config_of_run(path)
    evidence = gather(RunDir(path), config.optim.steps)
    status = infer_status(evidence)
    is_running = status.state is State.RUNNING
    speed, left = evidence.metrics.recent_tokens_per_second, None
    if speed and is_running:
        left = tokens_of_steps(config, range(evidence.latest_step, config.optim.steps)) / speed
    began = last_of(evidence.ledger, TrainingBegan)
    job = last_of(evidence.ledger, Submitted, JobStarted)
    interrupted = interruptions(evidence.ledger, is_running or status.state is State.UNRESPONSIVE)
    spent = evidence.time_spent(is_running)
    mirrored, mirror_problem = state_of_mirror(evidence.ledger)
    now = evidence.clock if is_running else evidence.now
    age = None if evidence.checkpoint_time is None else evidence.now - evidence.checkpoint_time
    return RunState(
        name=config.name,
        path=str(path),
        state=status.state,
        reason=status.reason,
        is_lost=status.is_lost,
        needs_resume=status.needs_resume,
        is_job_open=isinstance(last_of(evidence.ledger, JobStarted, JobEnded), JobStarted),
        attempts=num_attempts(evidence.ledger, is_running),
        ranks=None if began is None else began.world_size,
        nodes=_nodes(evidence),
        replaced_nodes=tuple(
            event.description for event in events_of(evidence.ledger, NodeReplaced)
        ),
        job=None if job is None else job.job,
        job_names=job_names(evidence.ledger),
        step=evidence.latest_step,
        steps=evidence.steps,
        results=results_of(
            config, evidence.metrics, evidence.ledger, None if spent is None else spent.goodput
        ),
        evaluation=evidence.metrics.evaluation,
        time_spent=spent,
        recent_tokens_per_second=speed,
        seconds_left=left,
        checkpoint=evidence.checkpoint,
        checkpoint_age=None if age is None else max(0.0, age),
        mirrored=mirrored,
        mirror_problem=mirror_problem,
        last_failure=interrupted[-1].description if interrupted else "",
        last_failure_age=now - interrupted[-1].time if interrupted else None,
        interval=config.checkpoint.interval,
    )


def state_of_mirror(ledger: Sequence[Event]) -> tuple[int | None, str]:
    """The latest step in the object store, and why the one after it is not there."""
    stored, last = last_stored(ledger), last_of(ledger, Mirrored, Restored)
    problem = last.problem if isinstance(last, Mirrored) else ""
    return (None if stored is None else stored.step), problem


def config_of_run(path: Path) -> RunConfig:
    """A run's settings, or those it was submitted with if it has not started.

    ConfigError if there is no run.
    """
    return submitted_config(path) or RunDir.open(path).config


def submitted_config(path: Path) -> RunConfig | None:
    """The settings that a run was submitted with; None once it has begun."""
    submitted = Snapshot(path).experiment
    if submitted.is_file() and not RunDir(path).exists():
        return load_config(RunConfig, submitted)
    return None


def _nodes(evidence: Evidence) -> tuple[str, ...]:
    # Without their domains, as Slurm names nodes.
    hostnames = {heartbeat.hostname.partition(".")[0] for heartbeat in evidence.heartbeats}
    started = last_of(evidence.ledger, JobStarted)
    return tuple(sorted(hostnames)) or (() if started is None else started.nodes)
