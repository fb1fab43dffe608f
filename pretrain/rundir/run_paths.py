"""Where runs are unless a flag says otherwise, and how a command line names them. Torch-free."""

import os
from pathlib import Path

from foundation.errors import did_you_mean
from foundation.files import YAML_SUFFIXES
from pretrain.checkpoint.directory import STEP_NAME

RUNS = Path("runs")
RUN_FILE = "run.json"  # in the directory of a run
EXPORTED_WEIGHTS = "model.safetensors"  # in the directory of an export
_OF_RUNS = (RUN_FILE, "checkpoints", "slurm", EXPORTED_WEIGHTS)
_MOST_SHOWN = 6  # runs of a sweep in an error message


def run_path(text: str | Path) -> Path:
    """Return the path of the argument RUN, which may be NAME or SWEEP/CELL in runs/.

    A run in runs/ also goes before a folder NAME with nothing of a run or an export in it.
    """
    path, named = Path(text), RUNS / text
    if any(os.path.exists(path / name) for name in _OF_RUNS):
        return path
    return named if os.path.exists(named / RUN_FILE if os.path.exists(path) else named) else path


def runs_below(path: Path) -> list[Path]:
    """Return the runs directly in `path`, as in the directory of a sweep, by their names."""
    return sorted(file.parent for file in path.glob(f"*/{RUN_FILE}"))


def advice_on(path: Path) -> str:
    """Return what to do about a path that holds no run, for the end of an error message."""
    if path.suffix in YAML_SUFFIXES:
        return "name the run's directory, by default runs/NAME"
    if step := STEP_NAME.fullmatch(path.name):
        return f"name a run's checkpoint {path.parent.parent}@{int(step[1])}"
    if (path / EXPORTED_WEIGHTS).is_file():
        return "it is an export; 'pretrain evaluate' and 'generate' take one without --format"
    if cells := runs_below(path):
        shown = ", ".join(map(str, cells[:_MOST_SHOWN]))
        more = ", ..." if len(cells) > _MOST_SHOWN else ""
        return f"its runs are {shown}{more} (name one)"
    runs = [run.name for folder in (path.parent, RUNS) for run in runs_below(folder)]
    hint = did_you_mean(path.name, [name for name in runs if name != str(path)])
    return hint.removeprefix("; ") if "did you mean" in hint else "check the path or start a run"
