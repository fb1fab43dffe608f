"""RUN@STEP, RUN@best and RUN@last: how a command line names a checkpoint of a run. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from foundation.errors import ConfigError
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.verify import counts, steps_that_count
from pretrain.errors import CheckpointError
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path


class RunStep(NamedTuple):
    """A run's directory and the step of one of its checkpoints; None: none was named."""

    run: Path
    step: int | None = None


def run_step(text: str | Path) -> RunStep:
    """Return what RUN, RUN@STEP, RUN@best or RUN@last names; RUN may be a name in runs/.

    `best` is the checkpoint with the lowest validation loss, `last` the latest one. CheckpointError
    if the run has no such checkpoint, with those that it has; ConfigError if it is no run. Without
    `@` nothing is read. What the files contain is left to `verify`.
    """
    head, at, name = str(text).rpartition("@")
    if not at or "/" in name or run_path(text).exists():
        return RunStep(run_path(text))
    run_dir = RunDir.open(run_path(head))
    if name.isdecimal():
        if counts(step_directory(run_dir.checkpoints, int(name))):
            return RunStep(run_dir.path, int(name))
        raise CheckpointError(
            f"{run_dir.path} has no usable checkpoint of step {name}; {_kept(run_dir)}"
        )
    if name not in ("best", "last"):
        raise ConfigError(f"{text}: found {name!r} behind @, expected a step, best or last")
    steps = steps_that_count(run_dir.checkpoints)
    if name == "best":
        losses = {
            line["step"]: line["loss"]
            for line in run_dir.read_metrics()
            if line["kind"] == "evaluation" and line["loss"] is not None
        }
        steps = sorted((step for step in steps if step in losses), key=losses.__getitem__)[:1]
    if not steps:
        lacking = "no evaluated checkpoint" if name == "best" else "no checkpoint yet"
        raise CheckpointError(f"{run_dir.path} has {lacking}; {_kept(run_dir)}")
    return RunStep(run_dir.path, steps[-1])


def _kept(run_dir: RunDir) -> str:
    """Return what to name instead, for the end of an error."""
    steps = ", ".join(map(str, steps_that_count(run_dir.checkpoints)))
    return f"name one of its steps: {steps}" if steps else "train until one is saved"
