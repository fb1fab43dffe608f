"""The runs of a sweep's cells, and the runs that arguments of commands stand for. Torch-free.

An argument may be a run directory, a folder of runs, or a sweep file.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import ConfigError, did_you_mean
from foundation.files import YAML_SUFFIXES
from foundation.settings import load_config
from foundation.yaml_files import find_config, read_tree
from pretrain.config.run import RunConfig
from pretrain.rundir.changed_settings import planned_otherwise
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import RUNS
from pretrain.sweeps.sweep_file import Cell, Sweep, read_sweep
from pretrain.terminal.text import counted

_DEPTH = 3  # folders below a root in which runs are looked for: RUNS/SWEEP/CELL, and one more
_MOST_SHOWN = 3  # settings that a message lists
_log = logging.getLogger(__name__)


def config_of(cell: Cell, sweep_path: Path) -> RunConfig:
    """Return the settings of a cell's run; ConfigError names the cell."""
    # A planned sweep's directory may not exist yet, so `..` after it must be removed here.
    path = Path(os.path.normpath(sweep_path.parent.resolve() / cell.experiment))
    if not find_config(path).exists():
        others = [item.name for item in path.parent.glob("*.y*ml") if item.name != sweep_path.name]
        raise ConfigError(
            f"{sweep_path}: cell {cell.name}: {path} does not exist (experiment is relative to "
            f"the sweep's file){did_you_mean(path.name, others)}"
        )
    try:
        return load_config(RunConfig, path, cell.overrides, overridden_by="overrides")
    except ConfigError as error:
        raise ConfigError(f"{sweep_path}: cell {cell.name}: {error}") from None


def _holds_run(path: Path) -> bool:
    return RunDir(path).exists()


def cells_directory(sweep: Sweep, given: Path | None = None) -> Path:
    """Return the parent of the cells' run directories: `given` (--runs-dir), or runs/SWEEP."""
    return given or RUNS / sweep.name


@dataclass(frozen=True)
class PlacedCell:
    """A cell of a sweep's file, its settings as planned, and where its run is."""

    cell: Cell
    config: RunConfig
    path: Path
    varies: str = ""  # what the sweep's plan varied


def cells_of(sweep: Sweep, file: Path, runs: Path) -> list[PlacedCell]:
    """Return the sweep's cells with their runs in `runs`; ConfigError where one is another run."""
    cells = [
        PlacedCell(cell, config_of(cell, file), runs / cell.name, sweep.varies)
        for cell in sweep.cells
    ]
    refuse_others((placed.path, other_settings(placed.path, placed.config)) for placed in cells)
    return cells


def other_settings(path: Path, config: RunConfig, own: RunConfig | None = None) -> str:
    """Return how the run in `path` differs from `config`, as `seed 1 -> 2`; "" if it does not.

    `own` are the settings to compare if the run has not begun. "" for a damaged run, too: its
    reader says what is wrong.
    """
    run_dir = RunDir(path)
    try:
        before = own or (run_dir.config if run_dir.exists() else config)
        changes = planned_otherwise(before, config)
    except ConfigError:
        return ""
    shown = [f"{key} {change}" for key, change in changes.items()]
    more = [f"{len(shown) - _MOST_SHOWN} more"] if len(shown) > _MOST_SHOWN else []
    return ", ".join([*shown[:_MOST_SHOWN], *more])


def refuse_others(others: Iterable[tuple[Path, str]]) -> None:
    """Raise ConfigError for the first cell's run that has other settings than its cell."""
    if wrong := [(path, other) for path, other in others if other]:
        path, other = wrong[0]
        more = f" (and {counted(len(wrong) - 1, 'more such cell')})" if wrong[1:] else ""
        raise ConfigError(
            f"cell {path.name}: the run in {path} has other settings: {other}{more}; plan the "
            "sweep under another name, or remove its old runs"
        )


def runs_of(paths: Sequence[Path], is_run: Callable[[Path], bool] = _holds_run) -> list[Path]:
    """Return the runs that the paths stand for, each once.

    A path stands for a run, the runs in a folder, or a sweep's started cells. Any other path is
    returned as it is: whoever reads it as a run refuses it.
    """
    runs: list[Path] = []
    for path in paths:
        if path.suffix in YAML_SUFFIXES and find_config(path).is_file():
            runs += _started_cells(path, is_run)
        else:
            runs += list(find_runs(path, is_run)) or [path]
    return list(dict.fromkeys(runs))


def find_runs(
    root: Path, is_run: Callable[[Path], bool] = _holds_run, depth: int = _DEPTH
) -> Iterator[Path]:
    """Yield run directories at or under `root`, sorted by names, with numbers in numeric order.

    A directory that this user may not read is left out with a warning.
    """
    try:
        if is_run(root):
            yield root
            return
        entries = list(root.iterdir()) if depth and root.is_dir() else []
    except OSError as error:
        _log.warning("%s cannot be searched for runs: %s", root, error.strerror)
        return
    for entry in sorted(entries, key=_by_number):
        if entry.is_dir() and not entry.name.startswith("."):
            yield from find_runs(entry, is_run, depth - 1)


def _started_cells(path: Path, is_run: Callable[[Path], bool]) -> list[Path]:
    """Return the runs of the cells that have started; ConfigError if none has."""
    tree = read_tree(path)
    if not tree.keys() & {"cells", "grid"}:
        raise ConfigError(
            f"{path} is not a sweep (it has neither cells nor grid); if it is an experiment, name "
            f"its run, by default {RUNS / str(tree.get('name', 'NAME'))}"
        )
    sweep = read_sweep(path)
    folder = cells_directory(sweep)
    started = [cell.path for cell in cells_of(sweep, path, folder) if is_run(cell.path)]
    if not started:
        raise ConfigError(
            f"{path}: none of its {len(sweep.cells)} cells has started in {folder}; name the "
            "folder of its runs, or start it with 'launcher sweep submit'"
        )
    return started


def _by_number(path: Path) -> list[str | int]:
    """Return a key that sorts `memory_64` before `memory_256`: texts and numbers in turn."""
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
