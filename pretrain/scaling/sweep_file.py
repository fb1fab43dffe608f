"""The file of a sweep: which cells there are, each an experiment file plus overrides. Torch-free.

format: 1
name: books                          # the sweep's name
notes: [...]                         # how it was planned, for people
cells:
  - name: c1e17-n12M                 # also the name of the run's directory
    experiment: ../experiments/books.yaml     # relative to this file
    overrides: [seed=1, model.num_layers=4, ...]      # as on the command line
    facts: {budget: 1.0e+17, ...}    # numbers of the plan; a runner copies them, and needs none
    holdout: false                   # true: predicted from the others, never fitted
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.config_loader import load_config, parse_config, to_tree
from data_pipeline.errors import ConfigError
from data_pipeline.files import write_text
from data_pipeline.yaml_files import dump_yaml, read_tree
from pretrain.config import RunConfig

FORMAT = 1


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
    notes: tuple[str, ...] = ()
    cells: tuple[Cell, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ConfigError(f"format={self.format}, this version reads sweeps of format {FORMAT}")
        if not self.cells:
            raise ConfigError("cells is empty; a sweep needs at least one")
        repeated = [name for name, count in Counter(cell.name for cell in self.cells).items() if count > 1]
        if repeated:
            raise ConfigError(f"cells: the name {repeated[0]!r} is there twice; each cell needs a directory of its own")
        unusable = [cell.name for cell in self.cells if not cell.name or "/" in cell.name or cell.name.startswith(".")]
        if unusable:
            raise ConfigError(f"cells: {unusable[0]!r} cannot be the name of a directory; use letters, digits, - and _")


def read_sweep(path: Path) -> Sweep:
    """A sweep file; ConfigError lists everything that is wrong with it."""
    tree = read_tree(path)
    cells = tree.get("cells")
    if isinstance(cells, list):
        # Cell by cell, because names inside a list are not checked otherwise.
        parsed = [parse_config(Cell, cell, f"{path}: cells[{index}]") for index, cell in enumerate(cells)]
        tree["cells"] = [to_tree(cell) for cell in parsed]
    return parse_config(Sweep, tree, str(path))


def write_sweep(path: Path, sweep: Sweep) -> None:
    """Write a sweep file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = "# A sweep: cells to run, each an experiment file and overrides. Format: docs/scaling.md.\n"
    write_text(path, header + dump_yaml(to_tree(sweep)))


def config_of(cell: Cell, sweep_path: Path) -> RunConfig:
    """The run of a cell."""
    return load_config(RunConfig, sweep_path.parent / cell.experiment, cell.overrides)
