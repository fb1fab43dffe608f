"""The ranks of a run and the collectives that the loop needs. Rank variables are read only here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from data_pipeline.errors import ConfigError, UserError
from pretrain.distributed.rendezvous import (
    collective_timeout,
    meeting_store,
    set_default_timeout,
)
from pretrain.distributed.slurm_variables import is_slurm_task, rank_variables

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the ranks. `device` is the accelerator of `local_rank`, else the CPU."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_from_environment(environment: Mapping[str, str]) -> World:
    """Read the rank variables: RANK, WORLD_SIZE, LOCAL_RANK, else Slurm's, else one process."""
    try:
        if "RANK" in environment:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local_rank = int(environment.get("LOCAL_RANK", "0"))
        elif is_slurm_task(environment) and "MASTER_ADDR" in environment:
            # Without MASTER_ADDR it is one process, such as a command in an interactive job step.
            return world_from_environment(rank_variables(environment))
        else:
            rank, world_size, local_rank = 0, 1, 0
        if not 0 <= rank < world_size or local_rank < 0:
            raise ConfigError(
                f"found RANK={rank}, WORLD_SIZE={world_size} and LOCAL_RANK={local_rank}, expected "
                "0 <= RANK < WORLD_SIZE and 0 <= LOCAL_RANK; correct the variables"
            )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the rank variables are incomplete ({error}); set RANK, WORLD_SIZE and LOCAL_RANK"
        ) from None
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank, world_size, local_rank, device)


def ranks_on_this_node() -> int:
    """Return how many ranks share this node's cores, descriptors and memory."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))))


# Rank variables that `init_world` set for DeepSpeed, for `destroy_process_group` to remove.
_ADDED_VARIABLES: set[str] = set()


def init_world(watchdog_timeout_seconds: float = 0.0) -> World:
    """Join the other ranks. Collectives on CPU tensors use gloo, those on GPU tensors NCCL.

    A watchdog ends ranks that hang before their collectives time out.
    """
    world = world_from_environment(os.environ)
    if world.world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE={world.world_size} needs MASTER_ADDR and MASTER_PORT; "
            "start ranks with 'launcher local'"
        )
    # DeepSpeed reads these even for one process.
    own = {"RANK": world.rank, "WORLD_SIZE": world.world_size, "LOCAL_RANK": world.local_rank}
    _ADDED_VARIABLES.update(own.keys() - os.environ.keys())
    os.environ.update({name: str(value) for name, value in own.items()})
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if dist.is_initialized():
        return world
    timeout = collective_timeout(watchdog_timeout_seconds)
    set_default_timeout(timeout)
    if world.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    else:
        store = meeting_store(world.rank, world.world_size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
    )
    return world


def destroy_process_group() -> None:
    """Close the process group, so that no rank keeps waiting for one that ended."""
    if dist.is_initialized():
        dist.destroy_process_group()
    while _ADDED_VARIABLES:
        os.environ.pop(_ADDED_VARIABLES.pop(), None)


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank. It uses gloo, so the accelerator does not wait."""
    return on_any_rank([flag])[0]


def on_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Return `any_rank` of several flags, in one collective."""
    if dist.get_world_size() == 1:
        return list(flags)
    values = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.bool().tolist()


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, on every rank; `tensor` itself is not changed."""
    total = tensor.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


def max_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each element over all ranks, on every rank."""
    largest = tensor.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def broadcast_object(value: T) -> T:
    """Return, on every rank, the small picklable value that rank 0 passes."""
    if dist.get_world_size() == 1:
        return value
    holder: list[Any] = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Run the block on every rank; if any raises a UserError, every rank raises the first one."""
    problem: UserError | None = None
    try:
        yield
    except UserError as error:
        problem = error
    for found in gather_objects(problem):
        if found is not None:
            raise found


def gather_objects(value: T) -> list[T]:
    """Return the small picklable values of all ranks, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
