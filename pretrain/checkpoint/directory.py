"""The directory of a checkpoint: its files, and the space they need. Torch-free.

RUN/checkpoints/step-00000100/
    rank-00000.safetensors   one file per rank: fragments of weights and moments, lane memories,
                             random-number state
    index.json               sizes and SHA-256 of all files, what is in them, the ranks' lanes and
                             their cursor, and the run's id, step and settings
    COMPLETE                 the marker: SHA-256 of index.json (`verify.py`)
    REFUSED                  only if a start could not resume from it: the reason
"""

import os
import re
import shutil
from pathlib import Path

from foundation.errors import STORAGE_FAILS
from foundation.files import make_directory
from pretrain.errors import CheckpointError, UnreadableError

MARKER = "COMPLETE"
INDEX = "index.json"
REFUSED = "REFUSED"
MEMORY = "memory."  # starts the keys of lane memories; then comes the part's name
REMOVED = "-removed"  # ends the names of directories that are being removed
STEP_NAME = re.compile(r"step-(\d{8})")


def step_directory(root: Path, step: int) -> Path:
    """Return the path of the published checkpoint of `step`."""
    return root / f"step-{step:08d}"


def partial_directory(root: Path, step: int, attempt: str) -> Path:
    """Return the path of an unpublished checkpoint.

    The attempt is part of the name, so that a surviving rank of an earlier attempt cannot add files
    to this one.
    """
    return root / f".partial-{step:08d}-{attempt}"


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank has written."""
    return f"rank-{rank:05d}.safetensors"


def steps_on_disk(root: Path) -> list[int]:
    """Return the steps of all published checkpoints, oldest first; corrupted ones are included."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        kind = UnreadableError if error.errno in STORAGE_FAILS else CheckpointError
        raise kind(f"{root}: cannot be listed: {error.strerror}") from error
    matches = map(STEP_NAME.fullmatch, names)
    return sorted(int(match.group(1)) for match in matches if match)


def require_space(root: Path, num_bytes: int) -> None:
    """Raise CheckpointError if the file system of `root` has less than `num_bytes` free."""
    if not root.is_dir():
        make_directory(root)
    free = shutil.disk_usage(root).free
    if free < num_bytes:
        raise CheckpointError(
            f"{root}: found {free / 2**20:.1f} MiB free, expected {num_bytes / 2**20:.1f} MiB"
        )
