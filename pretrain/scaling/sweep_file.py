"""The file of a sweep: its cells, each an experiment file plus overrides. Torch-free.

And which runs a command line means: run directories, folders of runs, sweep files.

format: 1
name: books                          # the sweep's name
varies: sizes                        # what a plan varied, which decides what its page shows
notes: [...]                         # how it was planned, for people
cells:
  - name: c1e17-n12M                 # also the name of the run's directory
    experiment: ../experiments/books.yaml     # relative to this file
    overrides: [seed=1, model.num_layers=4, ...]      # as on the command line
    facts: {budget: 1.0e+17, ...}    # numbers of the plan; a runner copies them, and needs none
    holdout: false                   # true: predicted from the others, never fitted

Instead of cells there may be a grid, from which they follow, one for each combination, the last
setting changing first:

experiment: ../experiments/books.yaml
grid: {optim.learning_rate: [3e-4, 1e-3], model.memory_length: [64, 128]}
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from foundation.errors import ConfigError
from foundation.files import YAML_SUFFIXES, make_directory, move, sync_tree, write_text
from foundation.records import json_text
from foundation.settings import LONGEST_NAME, load_config, parse_config, require_name, to_tree
from foundation.yaml_files import Tree, abbreviated, did_you_mean, dump_yaml, find_config, read_tree
from pretrain.checkpoint.directory import step_directory
from pretrain.config.run import RunConfig
from pretrain.rundir.events import Published
from pretrain.rundir.metrics_file import cut_measurements_after
from pretrain.rundir.run_dir import RUNS, RunDir, refuse_foreign_run
from pretrain.terminal.text import counted

FORMAT = 1
Kind = Literal["sizes", "rates", "lengths", "variants"]
MOST_CELLS = 100_000
_SAFE = re.compile(r"[^A-Za-z0-9.+-]+")  # characters that a directory's name should not have


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    name: str
    experiment: Path
    overrides: tuple[str, ...] = ()
    facts: dict[str, float] = field(default_factory=dict)
    holdout: bool = False
    starts_from: str = ""  # cell whose run it continues...
    starts_at: int = 0  # ...from this step on


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs that belong together."""

    format: int
    name: str
    varies: Kind = "sizes"
    notes: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"format={self.format}, this version reads sweeps of format {FORMAT}")
        if not self.cells:
            raise ConfigError("cells is empty; a sweep needs at least one")
        ((name, count),) = Counter(cell.name for cell in self.cells).most_common(1)
        if count > 1:
            raise ConfigError(
                f"cells: the name {name!r} is used twice; each cell needs its own directory"
            )
        require_name("name", self.name)
        for cell in self.cells:
            require_name("cells: name", cell.name)


def read_sweep(path: Path) -> Sweep:
    """A sweep file; ConfigError lists everything that is wrong with it."""
    if path.suffix not in YAML_SUFFIXES and not path.exists():
        beside = [path.with_name(f"{path.name}.yaml"), sweep_path(None, path.name)]
        found = [each for each in beside if find_config(each).is_file()]
        hint = f"; did you mean '{found[0]}'?" if found else ""
        raise ConfigError(f"{path} does not exist; expected the file of a sweep (YAML){hint}")
    tree = read_tree(path)
    if "grid" in tree:
        tree = _expanded(tree, path)
    cells = tree.get("cells")
    if not isinstance(cells, list):
        raise ConfigError(
            f"{path}: expected a grid, such as 'grid: {{optim.learning_rate: [3e-4, 1e-3]}}', or a "
            "list '- {name: ..., experiment: FILE, overrides: [...]}' under cells"
        )
    # Cell by cell, because names inside a list are not checked otherwise.
    parsed = []
    for index, cell in enumerate(cells):
        if isinstance(cell, dict):
            check_overrides(f"{path}: cells[{index}]: overrides", cell.get("overrides", []))
        parsed.append(to_tree(parse_config(Cell, cell, f"{path}: cells[{index}]")))
    return parse_config(Sweep, {**tree, "cells": parsed}, str(path))


def sweep_path(wanted: Path | None, name: str) -> Path:
    """The path that the sweep of this name is written to, if no other is wanted."""
    return wanted or Path("configs/sweeps") / f"{name}.yaml"


def write_sweep(path: Path, sweep: Sweep) -> None:
    """Write a sweep file, whole or not at all."""
    make_directory(path.parent)
    header = (
        "# A sweep: cells to run, each an experiment file and overrides. Format: docs/scaling.md.\n"
    )
    write_text(path, header + dump_yaml(to_tree(sweep)))


def check_overrides(name: str, value: Any) -> None:
    """Raise ConfigError unless the value in a file is a list of overrides."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(
            f"{name} is {abbreviated(value)}; write settings as on a command line: "
            "[seed=1, model.memory_length=64]"
        )


def _expanded(tree: Tree, path: Path) -> Tree:
    """The same sweep with the cells of its grid."""
    grid, experiment = tree.pop("grid"), tree.pop("experiment", None)
    if not isinstance(experiment, str) or "cells" in tree:
        raise ConfigError(
            f"{path}: a grid needs 'experiment: FILE', the experiment whose settings it varies, "
            "and has no cells beside it"
        )
    if not isinstance(grid, dict) or not grid:
        raise ConfigError(
            f"{path}: grid is {abbreviated(grid)}; "
            "write it as {optim.learning_rate: [3e-4, 1e-3], ...}"
        )
    for key, values in grid.items():
        is_list = isinstance(key, str) and isinstance(values, list) and values
        if not is_list or any(isinstance(each, dict) for each in values):
            raise ConfigError(
                f"{path}: grid.{key} is {abbreviated(values)}; "
                "expected a list of values, such as [1, 2], under the name of a setting"
            )
    if (count := math.prod(map(len, grid.values()))) > MOST_CELLS:
        raise ConfigError(
            f"{path}: the grid has {count:,} combinations, expected at most {MOST_CELLS:,}"
        )
    short = {key: key.rpartition(".")[2] for key in grid}
    if len(set(short.values())) < len(short):
        short = {key: key for key in grid}
    cells = []
    for values in itertools.product(*grid.values()):
        # As the values would stand on the command line.
        texts = [each if isinstance(each, str) else json_text(each) for each in values]
        texts = dict(zip(grid, texts, strict=True))
        name = "-".join(f"{short[key]}_{_SAFE.sub('_', text)}" for key, text in texts.items())
        if len(name) > LONGEST_NAME:  # its beginning, and a hash of all of it
            digest = hashlib.sha256(name.encode()).hexdigest()[:8]
            name = f"{name[: LONGEST_NAME - 9]}-{digest}"
        overrides = [f"name={name}", *(f"{key}={text}" for key, text in texts.items())]
        cells.append({"name": name, "experiment": experiment, "overrides": overrides})
    return {**tree, "cells": cells}


def config_of(cell: Cell, sweep_path: Path) -> RunConfig:
    """The run of a cell; ConfigError names the cell."""
    # The directory of a sweep that is being planned may not be there yet, and then has no '..'.
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


_DEPTH = 3  # RUNS/RUN, RUNS/SWEEP/CELL
_MOST_SHOWN = 3  # settings of a run that are not its cell's
_log = logging.getLogger(__name__)


def _holds_run(path: Path) -> bool:
    return RunDir(path).exists()


def cells_directory(sweep: Sweep, given: Path | None = None) -> Path:
    """The parent of the cells' run directories: the one given with --runs-dir, or runs/SWEEP."""
    return given or RUNS / sweep.name


@dataclass(frozen=True)
class PlacedCell:
    """A cell of a sweep's file, its settings as planned, and where its run is."""

    cell: Cell
    config: RunConfig
    path: Path
    varies: str = ""  # what the sweep's plan varied


def cells_of(sweep: Sweep, file: Path, runs: Path) -> list[PlacedCell]:
    """The cells of the sweep in `file`, with their runs in `runs`; all that reads runs of a sweep
    takes them from here.

    ConfigError for a run with other settings than its cell's.
    """
    cells = [
        PlacedCell(cell, config_of(cell, file), runs / cell.name, sweep.varies)
        for cell in sweep.cells
    ]
    refuse_others((each.path, other_settings(each.path, each.config)) for each in cells)
    return cells


def begin_branch(cell: Cell, config: RunConfig, runs: Path) -> None:
    """Make the run of a cell if it starts from another cell's, unless it is there.

    It has the other's checkpoint of that step and measurements up to it, under the same identity,
    so that it resumes from there. ConfigError if they differ in more than their names and steps.
    """
    target = RunDir(runs / cell.name)
    if not cell.starts_from or target.exists():
        return
    refuse_foreign_run(runs / cell.starts_from)
    source = RunDir.open(runs / cell.starts_from)
    saved = step_directory(source.checkpoints, cell.starts_at)
    own = replace(source.config, name=config.name, checkpoint=config.checkpoint)
    own = replace(own, optim=replace(own.optim, steps=config.optim.steps))
    others = source.other_settings(replace(config, name=source.config.name))
    is_constant = all(
        optim.schedule.shape == "wsd" and cell.starts_at <= optim.steps - optim.decay_steps
        for optim in (source.config.optim, own.optim)
    )
    if others or not saved.is_dir() or not is_constant:
        found = ", ".join(f"{key} {change}" for key, change in others.items())
        raise ConfigError(
            f"cell {cell.name} cannot start from {saved}: "
            f"{found or 'there is no such checkpoint, or its rate decays earlier'}; plan again"
        )
    made = RunDir(runs / f".{cell.name}.tmp")  # whole, or not there
    shutil.rmtree(made.path, ignore_errors=True)
    RunDir.create(made.path, own, branch_of=source.identity)
    step = step_directory(made.checkpoints, cell.starts_at)
    shutil.copytree(saved, step)
    made.ledger.append(Published(step=cell.starts_at, attempt=""))
    shutil.copy(source.metrics, made.metrics)
    cut_measurements_after(made.metrics, cell.starts_at)
    sync_tree(made.path)
    move(made.path, target.path)


def other_settings(path: Path, config: RunConfig, own: RunConfig | None = None) -> str:
    """In what the run in `path` is another than that of `config`: `seed 1 -> 2`; "" if in nothing.

    `own` are its settings if it has not begun. Of a damaged run its reader says more.
    """
    run_dir = RunDir(path)
    try:
        changes = run_dir.other_settings(config, own) if own or run_dir.exists() else {}
    except ConfigError:
        return ""
    shown = [f"{key} {change}" for key, change in changes.items()]
    more = [f"{len(shown) - _MOST_SHOWN} more"] if len(shown) > _MOST_SHOWN else []
    return ", ".join([*shown[:_MOST_SHOWN], *more])


def refuse_others(others: Iterable[tuple[Path, str]]) -> None:
    """Raise ConfigError for the first run of a cell whose `other_settings` are some."""
    if wrong := [(path, other) for path, other in others if other]:
        path, other = wrong[0]
        more = f" (and {counted(len(wrong) - 1, 'more such cell')})" if wrong[1:] else ""
        raise ConfigError(
            f"cell {path.name}: the run in {path} has other settings: {other}{more}; plan the "
            "sweep under another name, or remove its old runs"
        )


def runs_of(paths: Sequence[Path], is_run: Callable[[Path], bool] = _holds_run) -> list[Path]:
    """The runs that the paths stand for, each once: a run, the runs in a folder, a sweep's cells.

    A path that is none of them is kept, for its reader to refuse. ConfigError for a sweep that has
    not started.
    """
    found: list[Path] = []
    for path in paths:
        if path.suffix in YAML_SUFFIXES and find_config(path).is_file():
            found += _started_cells(path, is_run)
        else:
            found += list(find_runs(path, is_run)) or [path]
    return list(dict.fromkeys(found))


def find_runs(
    root: Path, is_run: Callable[[Path], bool] = _holds_run, depth: int = _DEPTH
) -> Iterator[Path]:
    """Run directories at or under `root`, in the order of their names and of numbers in them.

    Runs are not searched for other runs. A directory that this user may not read is passed over,
    with a warning.
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
    """Run directories of the cells that have started, of the sweep in the file `path`.

    ConfigError if none has, or one is another run.
    """
    tree = read_tree(path)
    if not tree.keys() & {"cells", "grid"}:
        raise ConfigError(
            f"{path} is not a sweep (it has neither cells nor grid); if it is an experiment, name "
            f"its run, by default {RUNS / str(tree.get('name', 'NAME'))}"
        )
    sweep = read_sweep(path)
    folder = cells_directory(sweep)
    found = [cell.path for cell in cells_of(sweep, path, folder) if is_run(cell.path)]
    if not found:
        raise ConfigError(
            f"{path}: none of its {len(sweep.cells)} cells has started in {folder}; name the "
            "folder of its runs, or start it with 'launcher sweep submit'"
        )
    return found


def _by_number(path: Path) -> list[str | int]:
    """A key that sorts `memory_64` before `memory_256`; texts and numbers alternate in it."""
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
