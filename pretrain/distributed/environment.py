"""What the bits of a result depend on besides the settings: versions, devices, threads.

A resume is bitwise only in the same environment: other versions, instruction sets, GPUs and numbers
of threads add in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from pretrain.distributed.threads import describe_waiting
from pretrain.distributed.world import World, gather_values
from pretrain.kernels.triton.tile_table import table_name

PACKAGES = ("torch", "numpy", "deepspeed")
WAITING_NAME = "threads wait"  # changes speed, but no bit of a result


def environment_of_ranks(world: World) -> dict[str, str]:
    """Return the environment by name; where ranks differ, all their values. A collective."""
    ranks = gather_values(environment_of_rank(world.device), dict[str, str])
    found = {name: sorted({each[name] for each in ranks}) for name in ranks[0]}
    return {name: ", ".join(values) for name, values in found.items()}


def environment_of_rank(device: torch.device) -> dict[str, str]:
    """Return the environment of this process, by name."""
    return {
        **{package: _version(package) for package in PACKAGES},
        "CUDA": (torch.version.cuda or "unknown") if device.type == "cuda" else "none",
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "attention tiles": table_name() if device.type == "cuda" else "none",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        WAITING_NAME: describe_waiting(),
    }


def environment_changes(
    before: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return what differs and may change bits: name -> (before, now); nothing where one of them is
    unknown."""
    return {
        name: (before[name], now[name])
        for name in now
        if name in before and before[name] != now[name] and name != WAITING_NAME
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
