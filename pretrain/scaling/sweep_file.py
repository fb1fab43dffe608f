"""The file of a sweep: which cells there are, each an experiment file plus overrides. Torch-free.

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
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from foundation.errors import ConfigError
from foundation.files import write_text
from foundation.settings import LONGEST_NAME, load_config, parse_config, require_name, to_tree
from foundation.yaml_files import (
    YAML_SUFFIXES,
    Tree,
    abbreviated,
    did_you_mean,
    dump_yaml,
    find_config,
    read_tree,
)
from pretrain.config.run import RunConfig

FORMAT = 1
Axis = Literal["sizes", "rates", "lengths", "variants"]
MOST_CELLS = 100_000
LARGEST_FACT = 1e300  # an integer may be larger than any float
_LIST_CELLS = "list '- {name: ..., experiment: FILE, overrides: [...]}' under cells"
_SAFE = re.compile(r"[^A-Za-z0-9.+-]+")  # characters that a directory's name should not have


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    name: str
    experiment: Path
    overrides: tuple[str, ...] = ()
    facts: dict[str, float] = field(default_factory=dict)
    holdout: bool = False


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs that belong together."""

    format: int
    name: str
    varies: Axis = "sizes"
    notes: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"format={self.format}, this version reads sweeps of format {FORMAT}")
        if not self.cells:
            raise ConfigError("cells is empty; a sweep needs at least one")
        repeated = [
            name for name, count in Counter(cell.name for cell in self.cells).items() if count > 1
        ]
        if repeated:
            raise ConfigError(
                f"cells: the name {repeated[0]!r} is used twice; each cell needs its own directory"
            )
        require_name("name", self.name)
        for cell in self.cells:
            require_name("cells: name", cell.name)


def read_sweep(path: Path) -> Sweep:
    """A sweep file; ConfigError lists everything that is wrong with it."""
    _refuse_name(path)
    tree = read_tree(path)
    _check_form(tree, path)
    if "grid" in tree:
        tree = _expanded(tree, path)
    cells = tree.get("cells")
    if isinstance(cells, list):
        # Cell by cell, because names inside a list are not checked otherwise.
        parsed = [
            parse_config(Cell, cell, f"{path}: cells[{index}]") for index, cell in enumerate(cells)
        ]
        tree["cells"] = [to_tree(cell) for cell in parsed]
    return parse_config(Sweep, tree, str(path))


def sweep_path(wanted: Path | None, name: str) -> Path:
    """The path that the sweep of this name is written to, if no other is wanted."""
    return wanted or Path("configs/sweeps") / f"{name}.yaml"


def write_sweep(path: Path, sweep: Sweep) -> None:
    """Write a sweep file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = (
        "# A sweep: cells to run, each an experiment file and overrides. Format: docs/scaling.md.\n"
    )
    write_text(path, header + dump_yaml(to_tree(sweep)))


def _refuse_name(path: Path) -> None:
    """Raise ConfigError, with the file of that name if there is one, for the name of a sweep."""
    if path.suffix in YAML_SUFFIXES or path.exists():
        return
    beside = path.with_name(f"{path.name}.yaml")
    found = [each for each in (beside, sweep_path(None, path.name)) if find_config(each).is_file()]
    hint = f"; did you mean '{found[0]}'?" if found else ""
    raise ConfigError(f"{path} does not exist; expected the file of a sweep (YAML){hint}")


def _check_form(tree: Tree, path: Path) -> None:
    """ConfigError, with what to write, for what people try first in place of this format."""
    grid, cells = tree.get("grid"), tree.get("cells")
    problem = ""
    if "format" not in tree:
        problem = f"format is missing; write 'format: {FORMAT}' first"
    elif "name" not in tree:
        problem = "name is missing; write 'name: NAME', also the folder of its runs in runs/"
    elif "grid" not in tree and "cells" not in tree:
        problem = "found neither grid nor cells; write 'grid: {optim.learning_rate: [3e-4, 1e-3]}'"
    elif isinstance(tree.get("experiment"), list) or (
        isinstance(grid, dict) and "experiment" in grid
    ):
        problem = f"a grid varies the settings of one experiment; for several, {_LIST_CELLS}"
    elif "grid" not in tree and ("experiment" in tree or not isinstance(cells, list)):
        problem = f"expected cells that each name their experiment; {_LIST_CELLS}"
    if problem:
        raise ConfigError(f"{path}: {problem}")
    for number, cell in enumerate(cells if isinstance(cells, list) else ()):
        if isinstance(cell, dict):
            check_overrides(f"{path}: cells[{number}]: overrides", cell.get("overrides", []))


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
    if "cells" in tree:
        raise ConfigError(f"{path}: found both cells and grid; use one of them")
    if not isinstance(experiment, str):
        raise ConfigError(
            f"{path}: a grid needs 'experiment: FILE', the experiment whose settings it varies"
        )
    if not isinstance(grid, dict) or not grid:
        raise ConfigError(
            f"{path}: grid is {abbreviated(grid)}; "
            "write it as {optim.learning_rate: [3e-4, 1e-3], ...}"
        )
    if unknown := [key for key in tree if key not in ("format", "name", "notes")]:
        raise ConfigError(
            f"{path}: {unknown[0]}: unknown setting; beside a grid there are format, name, notes "
            "and experiment; a setting of all cells is a list of one value in the grid"
        )
    for key, values in grid.items():
        if not isinstance(key, str) or not isinstance(values, list) or not values:
            raise ConfigError(
                f"{path}: grid.{key} is {abbreviated(values)}; "
                "expected a list of values, such as [1, 2], under the name of a setting"
            )
    _refuse_bundles(grid, path)
    if (count := math.prod(map(len, grid.values()))) > MOST_CELLS:
        raise ConfigError(
            f"{path}: the grid has {count:,} combinations, expected at most {MOST_CELLS:,}"
        )
    combinations = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
    ]
    return {**tree, "cells": [_cell_of(settings, experiment) for settings in combinations]}


def _refuse_bundles(grid: Mapping[str, list[Any]], path: Path) -> None:
    """Raise ConfigError for values that each set several settings, under a name of their own."""
    known = [each.name for each in fields(RunConfig)]
    for key, values in grid.items():
        bundles = [each for each in values if isinstance(each, (dict, list))]
        if bundles and "." not in key and key not in known:
            raise ConfigError(
                f"{path}: grid.{key}: unknown setting, found {abbreviated(bundles[0])}; a grid "
                f"varies single settings; to vary several together, {_LIST_CELLS}"
            )


def _cell_of(settings: Mapping[str, Any], experiment: str) -> Tree:
    texts = {key: _value_text(value) for key, value in settings.items()}
    short = {key: key.rpartition(".")[2] for key in settings}
    if len(set(short.values())) < len(short):
        short = {key: key for key in settings}
    name = _short("-".join(f"{short[key]}_{_SAFE.sub('_', text)}" for key, text in texts.items()))
    return {
        "name": name,
        "experiment": experiment,
        "overrides": [f"name={name}", *(f"{key}={text}" for key, text in texts.items())],
        "facts": {
            key: float(value)
            for key, value in settings.items()
            if type(value) in (int, float) and abs(value) < LARGEST_FACT
        },
    }


def _short(name: str) -> str:
    """The name, or if it is too long its beginning and a hash of all of it."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{digest}"


def _value_text(value: Any) -> str:
    """As it would stand on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


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
