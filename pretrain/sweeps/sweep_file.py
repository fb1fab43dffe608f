"""The file of a sweep: its cells, each an experiment file plus overrides, or a grid. Torch-free.

A grid has a cell for each combination of values, the last setting changing first. docs/launcher.md
shows files of both kinds.
"""

import hashlib
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from foundation.cli import check_output_file
from foundation.errors import ConfigError, shown
from foundation.files import YAML_SUFFIXES, make_directory, write_text
from foundation.settings import LONGEST_NAME, parse_config, require_name
from foundation.typed_values import json_text, to_tree
from foundation.yaml_files import Tree, dump_yaml, find_config, read_tree

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
    starts_from: str = ""  # the cell whose run this cell continues
    starts_at: int = 0  # the step from which it continues that run


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
    """Return the sweep in a file; ConfigError lists everything that is wrong with it."""
    if path.suffix not in YAML_SUFFIXES and not path.exists():
        beside = [path.with_name(f"{path.name}.yaml"), sweep_path(None, path.name)]
        existing = [path_beside for path_beside in beside if find_config(path_beside).is_file()]
        hint = f"; did you mean '{existing[0]}'?" if existing else ""
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
    for index, cell in enumerate(cells):
        if isinstance(cell, dict):
            check_overrides(f"{path}: cells.{index}.overrides", cell.get("overrides", []))
    return parse_config(Sweep, tree, str(path))


def sweep_path(wanted: Path | None, name: str) -> Path:
    """Return the path to write a sweep to: `wanted`, or by default one from its name."""
    return wanted or Path("configs/sweeps") / f"{name}.yaml"


def write_sweep(path: Path, sweep: Sweep) -> None:
    """Write a sweep file, whole or not at all."""
    make_directory(path.parent)
    header = (
        "# A sweep: cells to run, each an experiment file and overrides. Format: docs/scaling.md.\n"
    )
    write_text(path, header + dump_yaml(to_tree(sweep)))


def check_sweep_output(path: Path, name: str) -> None:
    """Raise ConfigError unless a sweep can be written to `path`, replacing only a planned one."""
    require_name("--name", name)
    check_output_file("--output", path, f"{name}.yaml")
    if path.exists() and not _is_planned_sweep(path):
        raise ConfigError(f"--output {path} exists and is no planned sweep; choose another path")


def _is_planned_sweep(path: Path) -> bool:
    try:
        return "cells" in read_tree(path)
    except ConfigError:
        return False


def check_overrides(name: str, value: Any) -> None:
    """Raise ConfigError unless the value in a file is a list of overrides."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(
            f"{name} is {shown(value)}; write settings as on a command line: "
            "[seed=1, model.memory_length=64]"
        )


def _expanded(tree: Tree, path: Path) -> Tree:
    """Return the sweep's tree with the cells of its grid instead of the grid."""
    grid, experiment = tree.pop("grid"), tree.pop("experiment", None)
    if not isinstance(experiment, str) or "cells" in tree:
        raise ConfigError(
            f"{path}: a grid needs 'experiment: FILE', the experiment whose settings it varies, "
            "and has no cells beside it"
        )
    if not isinstance(grid, dict) or not grid:
        raise ConfigError(
            f"{path}: grid is {shown(grid)}; write it as {{optim.learning_rate: [3e-4, 1e-3], ...}}"
        )
    for key, values in grid.items():
        is_list = isinstance(key, str) and isinstance(values, list) and values
        if not is_list or any(isinstance(item, dict) for item in values):
            raise ConfigError(
                f"{path}: grid.{key} is {shown(values)}; "
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
        texts = [item if isinstance(item, str) else json_text(item) for item in values]
        texts = dict(zip(grid, texts, strict=True))
        name = "-".join(f"{short[key]}_{_SAFE.sub('_', text)}" for key, text in texts.items())
        if len(name) > LONGEST_NAME:  # cut it, and add a hash of the whole name
            digest = hashlib.sha256(name.encode()).hexdigest()[:8]
            name = f"{name[: LONGEST_NAME - 9]}-{digest}"
        overrides = [f"name={name}", *(f"{key}={text}" for key, text in texts.items())]
        cells.append({"name": name, "experiment": experiment, "overrides": overrides})
    return {**tree, "cells": cells}
