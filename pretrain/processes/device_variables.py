"""Variables of a rank on a GPU, with defaults for clusters; what is set already stays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping
from importlib.metadata import version
from pathlib import Path

from foundation.errors import DataError
from foundation.files import private_directory
from pretrain.distributed.slurm_variables import is_slurm_task

TRITON_CACHE = "TRITON_CACHE_DIR"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"  # its name in newer versions of torch


def set_device_variables(environment: MutableMapping[str, str], local: Path) -> None:
    """Set them before CUDA is used; `local` is a directory on the node's own disk.

    Segments that grow keep memory whole while the sizes of tensors change. More than a MiB of
    pinned host memory is not rounded up to a power of two, if torch can reuse such blocks. On
    Slurm, triton's compiled kernels stay on the node: hundreds of ranks that write into one home
    directory on a network disk wait for each other.
    """
    if ALLOCATOR not in environment and NEW_ALLOCATOR not in environment:
        environment[ALLOCATOR] = "expandable_segments:True"
        if tuple(map(int, version("torch").split(".")[:2])) >= (2, 15):
            environment[ALLOCATOR] += ",pinned_max_round_threshold_mb:1"
    if is_slurm_task(environment) and TRITON_CACHE not in environment:
        cache = local / f"triton-{os.getuid()}"
        with contextlib.suppress(OSError, DataError):  # its files are executed
            environment[TRITON_CACHE] = str(private_directory(cache))
