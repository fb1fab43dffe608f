"""A branch: a run that begins with another run's checkpoint and measurements. Torch-free."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from foundation.errors import ConfigError
from foundation.files import move, sync_tree
from pretrain.checkpoint.directory import step_directory
from pretrain.config.run import RunConfig
from pretrain.rundir.events import Published
from pretrain.rundir.metrics_file import cut_measurements_after
from pretrain.rundir.ownership import refuse_foreign_run
from pretrain.rundir.run_dir import RunDir


def begin_branch(config: RunConfig, directory: Path, source_directory: Path, step: int) -> None:
    """Make the run of `config` with the checkpoint of `step` of another run, unless it is there.

    It has the other's measurements up to that step, under the same identity, so that it resumes
    from there. ConfigError if they differ in more than their names and steps.
    """
    target = RunDir(directory)
    if target.exists():
        return
    refuse_foreign_run(source_directory)
    source = RunDir.open(source_directory)
    saved = step_directory(source.checkpoints, step)
    own = replace(source.config, name=config.name, checkpoint=config.checkpoint)
    own = replace(own, optim=replace(own.optim, steps=config.optim.steps))
    others = source.other_settings(replace(config, name=source.config.name))
    is_constant = all(
        optim.schedule.shape == "wsd" and step <= optim.steps - optim.decay_steps
        for optim in (source.config.optim, own.optim)
    )
    if others or not saved.is_dir() or not is_constant:
        changes = ", ".join(f"{key} {change}" for key, change in others.items())
        raise ConfigError(
            f"cell {directory.name} cannot start from {saved}: "
            f"{changes or 'there is no such checkpoint, or its rate decays earlier'}; plan again"
        )
    branch = RunDir(directory.with_name(f".{directory.name}.tmp"))  # whole, or not there
    shutil.rmtree(branch.path, ignore_errors=True)
    RunDir.create(branch.path, own, branch_of=source.identity)
    shutil.copytree(saved, step_directory(branch.checkpoints, step))
    branch.ledger.append(Published(step=step, attempt=""))
    shutil.copy(source.metrics, branch.metrics)
    cut_measurements_after(branch.metrics, step)
    sync_tree(branch.path)
    move(branch.path, target.path)
