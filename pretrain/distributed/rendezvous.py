"""The store where the ranks of a run meet, and how long they wait for each other there.

Rank 0 serves the store: a connection of every rank. With MASTER_PORT its port is given. With
PRETRAIN_PORT_FILE the kernel gives rank 0 one that is free at that moment, and the file, which all
ranks see, tells the others: neighbors on a host can not choose the same one.
"""

from __future__ import annotations

import datetime
import os
import resource
import socket
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from foundation.errors import ConfigError, UserError
from foundation.files import await_text, write_text
from pretrain.distributed.slurm_variables import PORT_FILE_VARIABLE, number_in

LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
LARGEST_MESH = 64  # ranks
MOST_DESCRIPTORS = 1 << 16
LOOPBACK = "127.0.0.1"  # where ranks of one machine meet
# Until all ranks have come, and in collectives of a run without a watchdog.
WITHOUT_WATCHDOG = datetime.timedelta(minutes=30)
_LONGEST_SUSPENSION = datetime.timedelta(days=7)


def prepare_descriptors(world_size: int) -> None:
    """Let this process open all files and connections that it may, up to MOST_DESCRIPTORS.

    By default gloo connects every rank with every other before the first collective. With more than
    LARGEST_MESH ranks it connects two when a collective first needs it: a few connections per rank,
    and two more where the number of ranks doubles. Smaller worlds connect all at once, so that a
    rank that dies before the first collective is noticed at once.
    """
    if world_size > LARGEST_MESH:
        os.environ.setdefault(LAZY_VARIABLE, "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def collective_timeout(watchdog_timeout_seconds: float) -> datetime.timedelta:
    """Return how long a collective may take: a rank's watchdog, which writes stacks, is earlier.

    The margin is as long as Slurm may suspend a job: the clocks of collectives run on meanwhile,
    the watchdog's does not.
    """
    if not watchdog_timeout_seconds:
        return WITHOUT_WATCHDOG
    return datetime.timedelta(seconds=watchdog_timeout_seconds) + _LONGEST_SUSPENSION


def meeting_store(rank: int, world_size: int) -> Store:
    """Open the store of all ranks, by the environment; UserError if rank 0 does not come."""
    file = os.environ.get(PORT_FILE_VARIABLE)
    if file is None and not 0 <= (port := number_in(os.environ, "MASTER_PORT")) < 1 << 16:
        raise ConfigError(f"found MASTER_PORT={port}, expected a port below 65536; correct it")
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's agent
    if file is None and os.environ["MASTER_ADDR"] == LOOPBACK and not is_served:
        return _loopback_store(rank, world_size)
    if file is None:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=WITHOUT_WATCHDOG))
        # An agent that restarts its ranks keeps the store, with the addresses of those that died.
        # Agents of several nodes may count their restarts differently.
        one_agent = is_served and os.environ.get("GROUP_WORLD_SIZE") == "1"
        return PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store) if one_agent else store
    return _store_by_file(Path(file), rank, world_size)


def _loopback_store(rank: int, world_size: int) -> Store:
    """Open the store of ranks on this machine; torch's own would listen on every interface."""
    port, listening = number_in(os.environ, "MASTER_PORT"), None
    if rank == 0:
        try:
            listening = socket.create_server((LOOPBACK, port), backlog=world_size).detach()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"MASTER_PORT={port}: {reason}; choose another port") from None
    return TCPStore(
        LOOPBACK,
        port,
        world_size,
        is_master=listening is not None,
        timeout=WITHOUT_WATCHDOG,
        master_listen_fd=listening,
    )


def _store_by_file(file: Path, rank: int, world_size: int) -> Store:
    port = 0 if rank == 0 else _port_in(file)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        world_size,
        is_master=rank == 0,
        timeout=WITHOUT_WATCHDOG,
        wait_for_workers=False,
    )
    if rank == 0:
        write_text(file, f"{store.port}\n")
    os.environ["MASTER_PORT"] = str(store.port)  # as without the file
    return store


def _port_in(file: Path) -> int:
    try:
        return int(await_text(file, WITHOUT_WATCHDOG.total_seconds()))
    except TimeoutError:
        raise UserError(
            f"{file}: rank 0 has not written its port for {WITHOUT_WATCHDOG}; see its log"
        ) from None
