"""Where runs are unless a flag says otherwise, and how they are named on a command line.

Torch-free.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from foundation.yaml_files import YAML_SUFFIXES, did_you_mean

RUNS = Path("runs")
EXPORTED_WEIGHTS = "model.safetensors"  # in the directory of an export
_MOST_SHOWN = 6  # runs of a sweep in an error message
logger = logging.getLogger(__name__)


def run_path(text: str | Path) -> Path:
    """The `type` of every argument RUN: a path, or that name in runs/.

    The name in runs/ is meant where the path does not exist, or is a directory without runs (a
    corpus of the same name) while there are runs of this name. Where neither exists, the name of a
    cell means its run, if only one sweep in runs/ has it: tables of a sweep show no more of it.
    """
    path = Path(text)
    named = RUNS / path
    if not path.exists():
        if named.exists():
            return named
        cells = _cells_named(path)
        return cells[0] if len(cells) == 1 else path
    is_hiding = path.name and path.is_dir() and not _has_runs(path) and _has_runs(named)
    return named if is_hiding else path


def runs_below(path: Path) -> list[Path]:
    """The runs directly in `path`, as in the directory of a sweep, by their names."""
    return sorted(file.parent for file in path.glob("*/run.json"))


def _cells_named(path: Path) -> list[Path]:
    """The runs of this name in the sweeps of runs/."""
    if len(path.parts) != 1:
        return []
    cells = (folder / path for folder in sorted(RUNS.glob("*")))
    return [cell for cell in cells if os.path.exists(cell / "run.json")]


def _has_runs(path: Path) -> bool:
    # A run that waits for its first attempt, or a damaged one, has its ledger.
    is_run = any((path / name).exists() for name in ("run.json", "ledger.jsonl"))
    return is_run or bool(runs_below(path))


def warn_of_missing_disk(path: Path) -> None:
    """Warn if making `path` would make parents in a place for mounts, where a disk may be missing.

    That is where the first of them would be at the root, or in a folder of the root that is no
    mount itself (/mnt/disk), temporary files excepted.
    """
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    if not missing:
        return
    above = missing[-1].parent
    is_place_for_mounts = len(above.parts) == 2 and not os.path.ismount(above)
    if len(above.parts) == 1 or (is_place_for_mounts and above != Path(tempfile.gettempdir())):
        logger.warning(
            "%s did not exist and is made for %s; if a disk should be mounted there, stop, mount "
            "it and remove the new directory",
            missing[-1],
            path,
        )


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
