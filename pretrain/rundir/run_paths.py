"""Where runs are unless a flag says otherwise, and how they are named on a command line.

Torch-free.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from data_pipeline.yaml_files import did_you_mean

RUNS = Path("runs")
logger = logging.getLogger(__name__)


def run_path(text: str | Path) -> Path:
    """The `type` of every argument RUN: a path, or where it does not exist, that name in runs/."""
    path = Path(text)
    named = RUNS / path
    return named if not path.exists() and named.exists() else path


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
    if path.suffix in (".yaml", ".yml"):
        return "name the run's directory, by default runs/NAME"
    runs = [
        file.parent.name for folder in (path.parent, RUNS) for file in folder.glob("*/run.json")
    ]
    hint = did_you_mean(path.name, runs)
    return hint.removeprefix("; ") if "did you mean" in hint else "check the path or start a run"
