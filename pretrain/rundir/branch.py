"""A branch: a run that begins with another run's checkpoint and measurements. Torch-free."""

import shutil
from dataclasses import replace
from pathlib import Path

from foundation.errors import ConfigError
from foundation.files import move, sync_tree
from foundation.settings import differences
from foundation.typed_values import to_tree
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.disk import write_index
from pretrain.checkpoint.verify import verify_and_keep
from pretrain.config.run import RunConfig
from pretrain.optim.schedule import learning_rate_at
from pretrain.rundir.changed_settings import planned_otherwise, refused_changes
from pretrain.rundir.events import Branched, Published, SettingsChanged, TrainingBegan
from pretrain.rundir.history import last_event, setting_changes, skipped_windows
from pretrain.rundir.metrics_file import cut_measurements_after
from pretrain.rundir.ownership import refuse_foreign_run
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.trained_data import refuse_other_data


def begin_branch(config: RunConfig, directory: Path, trunk: Path, step: int) -> None:
    """Make the run of `config` with the checkpoint of `step` of the run in `trunk`.

    It has an id of its own and the trunk's measurements up to that step, and its lanes continue
    from there. ConfigError if `config` changes what a resume from that step may not, or if the
    directory exists; DataError for data that it may not; CheckpointError for a damaged checkpoint.
    """
    refuse_foreign_run(trunk)
    source = RunDir.open(trunk)
    before, held = source.settings_at(step), source.settings_at(max(0, step - 1))
    before = replace(before, name=config.name)
    refused = refused_changes(before, config, step, held)
    if refused or directory.exists():
        changes = ", ".join(f"{key} {change}" for key, change in refused.items())
        problem = changes or "it exists; name another run"
        raise ConfigError(f"{directory} cannot branch from step {step} of {trunk}: {problem}")
    refuse_other_data(source, config)
    kept = verify_and_keep(step_directory(source.checkpoints, step), source.identity.id)
    branch = RunDir(directory.with_name(f".{directory.name}.tmp"))  # moved when it is whole
    shutil.rmtree(branch.path, ignore_errors=True)
    RunDir.create(branch.path, config)
    copy, ledger = step_directory(branch.checkpoints, step), source.ledger.read()
    shutil.copytree(kept.directory, copy)
    write_index(copy, {**kept.index, "run": branch.identity.id, "attempt": ""})
    windows = tuple((window.start, window.stop) for window in skipped_windows(ledger))
    began = vars(last_event(ledger, TrainingBegan, Branched) or Branched(step=step, origin=""))
    data = {name: began[name] for name in ("tokenizer", "validation", "sets")}
    origin = str(source.path.absolute())
    data["run_settings"] = to_tree(config)
    past = [(c.step, c.setting, c.old, c.new) for c in setting_changes(ledger) if c.step <= step]
    branched = Branched(step=step, origin=origin, windows=windows, changes=tuple(past), **data)
    branch.ledger.append(branched)
    if changes := differences(to_tree(before), to_tree(config)):
        branch.ledger.append(SettingsChanged(changes=changes, step=step))
    branch.ledger.append(Published(step=step, attempt=""))
    shutil.copy(source.metrics, branch.metrics)
    cut_measurements_after(branch.metrics, step)
    sync_tree(branch.path)
    move(branch.path, directory)


def begin_cell(config: RunConfig, directory: Path, trunk: Path, step: int) -> None:
    """Make the run of a cell of a sweep as a branch of another cell's, unless it is there.

    ConfigError if the cells differ in more than names, steps and checkpoints, or if at `step` their
    learning rates do.
    """
    if RunDir(directory).exists():
        return
    before = RunDir.open(trunk).config
    own = replace(before, name=config.name, checkpoint=config.checkpoint)
    own = replace(own, optim=replace(own.optim, steps=config.optim.steps))
    others = [f"{key} {change}" for key, change in planned_otherwise(own, config).items()]
    rates = {f"{learning_rate_at(run.optim, step):.6g}" for run in (before, own)}
    others += [f"learning rates {' and '.join(rates)}"] if len(rates) > 1 else []
    if problem := ", ".join(others):
        raise ConfigError(
            f"cell {directory.name} cannot start from step {step} of {trunk}: {problem}; plan again"
        )
    begin_branch(own, directory, trunk, step)
