"""The GPU of a rank, or what is wrong where its node has fewer than the job was given.

A job says in PRETRAIN_GPUS how many GPUs each of its nodes has. Without that variable, Slurm's own
is read. With 0, ranks train on CPUs if CUDA finds no GPU.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from foundation.errors import ConfigError, NodeError
from pretrain.distributed.slurm_variables import GPUS_VARIABLE, number_in

_DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")


def device_of_rank(environment: Mapping[str, str], local_rank: int) -> torch.device:
    """Return the accelerator of this rank of its node; the CPU if the node should have none.

    NodeError if CUDA does not work, or shows fewer GPUs than the job was given.
    """
    expected = number_in(environment, GPUS_VARIABLE, environment.get("SLURM_GPUS_ON_NODE", "0"))
    if torch.cuda.is_available():
        index = gpu_index(local_rank, torch.cuda.device_count(), expected, environment)
        return torch.device("cuda", index)
    if expected:
        raise NodeError(
            f"found no usable CUDA, expected {expected} GPUs on this node "
            f"({describe_cuda(environment)}); repair or exclude it, or train on CPUs with "
            f"{GPUS_VARIABLE}=0"
        )
    return torch.device("cpu")


def gpu_index(
    local_rank: int, visible: int, expected: int = 0, environment: Mapping[str, str] = os.environ
) -> int:
    """Return which of a rank's visible GPUs is its own.

    Where the site binds a GPU to each task, a task sees only that one, whatever its local rank, and
    CUDA_VISIBLE_DEVICES names no other.
    """
    if visible == 1 and "," not in environment.get("CUDA_VISIBLE_DEVICES", ""):
        return 0
    if visible < expected:
        raise NodeError(
            f"found {visible} GPUs, expected {expected} on this node "
            f"({describe_cuda(environment)}); repair or exclude it"
        )
    if local_rank >= visible:
        raise ConfigError(
            f"local rank {local_rank} found {visible} GPUs, expected one for each rank of its "
            "node; start as many ranks as GPUs (gpus_per_node), or let each see only its own"
        )
    return local_rank


def use_device(device: torch.device) -> None:
    """Make `device` torch's current one; NodeError if it does not work."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise NodeError(
            f"{device} cannot be used: {_first_line(error)} ({describe_cuda()}); repair or exclude "
            "this node"
        ) from None


def describe_cuda(environment: Mapping[str, str] = os.environ) -> str:
    """Return what explains missing GPUs: their count, versions, what hides them, CUDA's error."""
    facts = [
        f"device count {torch.cuda.device_count()}",
        f"torch.version.cuda {torch.version.cuda}",  # pyright: ignore[reportPrivateImportUsage]
        f"driver {driver_version() or 'none'}",
        f"CUDA_VISIBLE_DEVICES={environment.get('CUDA_VISIBLE_DEVICES', 'unset')}",
    ]
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        facts.append(_first_line(error))
    return ", ".join(facts)


def driver_version() -> str:
    """Return the version of NVIDIA's kernel driver; empty without one."""
    try:
        with open(_DRIVER) as file:
            match = _VERSION.search(file.read(4096))
    except OSError:
        return ""
    return match[0] if match else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
