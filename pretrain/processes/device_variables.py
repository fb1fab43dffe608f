"""Variables of a rank on a GPU, with defaults for clusters; what is set already stays."""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from pretrain.distributed.slurm_variables import is_slurm_task

TRITON_CACHE = "TRITON_CACHE_DIR"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"  # its name in newer versions of torch


def set_device_variables(environment: MutableMapping[str, str], local: Path) -> None:
    """Set them before CUDA is used; `local` is a directory on the node's own disk.

    Segments that grow keep memory whole while the sizes of tensors change. On Slurm, triton's
    compiled kernels stay on the node: hundreds of ranks that write into one home directory on a
    network disk wait for each other.
    """
    if ALLOCATOR not in environment and NEW_ALLOCATOR not in environment:
        environment[ALLOCATOR] = "expandable_segments:True"
    if is_slurm_task(environment) and TRITON_CACHE not in environment:
        cache = local / f"triton-{os.getuid()}"
        if _is_private(cache):
            environment[TRITON_CACHE] = str(cache)


def _is_private(directory: Path) -> bool:
    """Make the directory, and whether only this user can write: its files are executed."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return is_own and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
