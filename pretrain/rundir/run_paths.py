"""Where runs are unless a flag says otherwise, and how they are named on a command line.

Torch-free.
"""

from __future__ import annotations

from pathlib import Path

from data_pipeline.yaml_files import did_you_mean

RUNS = Path("runs")


def run_path(text: str | Path) -> Path:
    """The `type` of every argument RUN: a path, or where it does not exist, that name in runs/."""
    path = Path(text)
    named = RUNS / path
    return named if not path.exists() and named.exists() else path


def advice_on(path: Path) -> str:
    """What to do about a path that holds no run, for the end of an error message."""
    if path.suffix in (".yaml", ".yml"):
        return "name the run's directory, by default runs/NAME"
    runs = [
        file.parent.name for folder in (path.parent, RUNS) for file in folder.glob("*/run.json")
    ]
    hint = did_you_mean(path.name, runs)
    return hint.removeprefix("; ") if "did you mean" in hint else "check the path or start a run"
