"""Where runs are unless a flag says otherwise, and how they are named on a command line.

Torch-free.
"""

from __future__ import annotations

import os
from pathlib import Path

from foundation.yaml_files import YAML_SUFFIXES, did_you_mean

RUNS = Path("runs")
EXPORTED_WEIGHTS = "model.safetensors"  # in the directory of an export
_MOST_SHOWN = 6  # runs of a sweep in an error message


def run_path(text: str | Path) -> Path:
    """The `type` of every argument RUN: a path, or that name in runs/.

    The name in runs/ is meant where the path does not exist. Where neither exists, the name of a
    cell means its run, if only one sweep in runs/ has it: tables of a sweep show no more of it.
    """
    path = Path(text)
    if path.exists():
        return path
    if (named := RUNS / path).exists():
        return named
    cells = _cells_named(path)
    return cells[0] if len(cells) == 1 else path


def runs_below(path: Path) -> list[Path]:
    """The runs directly in `path`, as in the directory of a sweep, by their names."""
    return sorted(file.parent for file in path.glob("*/run.json"))


def _cells_named(path: Path) -> list[Path]:
    """The runs of this name in the sweeps of runs/."""
    if len(path.parts) != 1:
        return []
    cells = (folder / path for folder in sorted(RUNS.glob("*")))
    return [cell for cell in cells if os.path.exists(cell / "run.json")]


def advice_on(path: Path) -> str:
    """What to do about a path that holds no run, for the end of an error message."""
    if path.suffix in YAML_SUFFIXES:
        return "name the run's directory, by default runs/NAME"
    if (path / EXPORTED_WEIGHTS).is_file():
        return "it is an export, which 'pretrain evaluate' and 'pretrain generate' take"
    if cells := runs_below(path):
        return f"it is a sweep; its runs are {_first_of(cells)} (name one)"
    if cells := _cells_named(path):
        return f"several sweeps have a run of this name: {_first_of(cells)} (name one)"
    runs = [run.name for folder in (path.parent, RUNS) for run in runs_below(folder)]
    hint = did_you_mean(path.name, [name for name in runs if name != str(path)])
    return hint.removeprefix("; ") if "did you mean" in hint else "check the path or start a run"


def _first_of(runs: list[Path]) -> str:
    shown = ", ".join(map(str, runs[:_MOST_SHOWN]))
    return shown + (", ..." if len(runs) > _MOST_SHOWN else "")
