"""This process among the ranks of a run: its number, its device and the process group.

Rank variables are read only here and in `slurm_variables.py`.
"""

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from foundation.errors import ConfigError
from pretrain.distributed.rank_device import device_of_rank, use_device
from pretrain.distributed.rendezvous import (
    collective_timeout,
    prepare_descriptors,
    rendezvous_store,
)
from pretrain.distributed.slurm_variables import number_in, rank_numbers

# The values of rank variables before `init_world` set them for DeepSpeed.
_FORMER_VARIABLES: dict[str, str | None] = {}


@dataclass(frozen=True)
class World:
    """The numbers of this rank, and its device: the accelerator of `local_rank`, or the CPU."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_from_environment(environment: Mapping[str, str]) -> World:
    """Return the rank's numbers from the rank variables, with its device."""
    rank, world_size, local_rank = rank_numbers(environment)
    return World(rank, world_size, local_rank, device_of_rank(environment, local_rank))


def ranks_on_this_node() -> int:
    """Return how many ranks share this node's cores, descriptors and memory."""
    all_ranks = os.environ.get("WORLD_SIZE", "1")
    return max(1, number_in(os.environ, "LOCAL_WORLD_SIZE", all_ranks))


def init_world(watchdog_timeout_seconds: float = 0.0) -> World:
    """Join the other ranks. Collectives on CPU tensors use gloo, those on GPU tensors NCCL.

    A watchdog ends ranks that hang before their collectives time out.
    """
    former = {name: value for name, value in _FORMER_VARIABLES.items() if value is not None}
    world = world_from_environment({**os.environ, **former})
    if world.world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE={world.world_size} needs MASTER_ADDR and MASTER_PORT; "
            "start ranks with 'launcher local'"
        )
    # DeepSpeed reads these even for one process, and takes LOCAL_RANK for the device's index.
    index = world.local_rank if world.device.index is None else world.device.index
    own = {"RANK": world.rank, "WORLD_SIZE": world.world_size, "LOCAL_RANK": index}
    for name, value in own.items():
        _FORMER_VARIABLES.setdefault(name, os.environ.get(name))
        os.environ[name] = str(value)
    use_device(world.device)
    if dist.is_initialized():
        return world
    prepare_descriptors(world.world_size)
    timeout = collective_timeout(watchdog_timeout_seconds)
    # DeepSpeed creates groups without a timeout, which get torch's default: for NCCL 10 minutes,
    # less than the watchdog's. torch has no public setting for the default.
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)
    if world.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    else:
        store = rendezvous_store(world.rank, world.world_size)
    connect(world.device, store, world.rank, world.world_size, timeout)
    return world


def connect(
    device: torch.device, store: Store, rank: int, world_size: int, timeout: datetime.timedelta
) -> None:
    """Make the process group of all ranks that use this store."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        # With a device NCCL connects now, so that a failure shows here and not in the first step.
        device_id=device if on_gpu else None,
    )


def destroy_process_group() -> None:
    """Close the process group, so that no rank keeps waiting for one that ended."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in _FORMER_VARIABLES.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    _FORMER_VARIABLES.clear()
