"""How many files and connections a rank may have open, and how few its collectives need.

Rank 0 serves the store where ranks meet: a connection of every rank. By default gloo connects
every rank with every other before the first collective, which takes as many again on each rank.
"""

from __future__ import annotations

import os
import resource

from data_pipeline.errors import ConfigError

LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
LARGEST_MESH = 64  # ranks
OWN_DESCRIPTORS = 512  # libraries, logs, shards, checkpoints


def prepare_descriptors(rank: int, world_size: int) -> None:
    """Raise this process's limit as far as its connections need; ConfigError if it may not be.

    From more than LARGEST_MESH ranks on, gloo connects two ranks when a collective first needs it:
    those are a few per rank, and two more where their number doubles. Smaller worlds connect all at
    once, because then a rank that dies before the first collective is noticed at once.
    """
    if world_size > LARGEST_MESH:
        os.environ.setdefault(LAZY_VARIABLE, "1")
    is_mesh = os.environ.get(LAZY_VARIABLE) != "1"
    needed = needed_descriptors(rank, world_size, is_mesh)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"rank {rank} of {world_size:,} needs {needed:,} open files and connections, and its "
            f"hard limit is {hard:,}; raise it (ulimit -Hn, or LimitNOFILE of slurmd)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def needed_descriptors(rank: int, world_size: int, is_mesh: bool) -> int:
    """Return how many descriptors a rank has open at most."""
    store = world_size if rank == 0 else 1
    return OWN_DESCRIPTORS + store + (world_size if is_mesh else 0)
