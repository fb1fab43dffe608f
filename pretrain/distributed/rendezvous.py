"""Where the ranks of a run meet: a store that rank 0 serves, and how long they wait for each other.

With MASTER_PORT the port is given. With PRETRAIN_PORT_FILE the kernel gives rank 0 one that is free
at that moment, and the file, which all ranks see, tells the others: neighbors on a host can not
choose the same one.
"""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path

from torch.distributed import Store, TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from data_pipeline.errors import ConfigError, UserError
from data_pipeline.files import await_text, write_text
from pretrain.distributed.slurm_variables import PORT_FILE_VARIABLE, number_in

LOOPBACK = "127.0.0.1"  # where ranks of one machine meet
# Until all ranks have come, and in collectives of a run without a watchdog.
WITHOUT_WATCHDOG = datetime.timedelta(minutes=30)
_LONGEST_SUSPENSION = datetime.timedelta(days=7)


def collective_timeout(watchdog_timeout_seconds: float) -> datetime.timedelta:
    """How long a collective may take: the watchdog of a rank, which writes stacks, ends it before.

    The margin is as long as Slurm may suspend a job: the clocks of collectives run on meanwhile,
    that of the watchdog does not.
    """
    if not watchdog_timeout_seconds:
        return WITHOUT_WATCHDOG
    return datetime.timedelta(seconds=watchdog_timeout_seconds) + _LONGEST_SUSPENSION


def set_default_timeout(timeout: datetime.timedelta) -> None:
    """Let groups that others create without a timeout (DeepSpeed's) have this one: torch has no
    public setting, and its 10 minutes for NCCL are shorter than a watchdog's."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)


def meeting_store(rank: int, world_size: int) -> Store:
    """The store of all ranks, from the environment; UserError if rank 0 does not come."""
    file = os.environ.get(PORT_FILE_VARIABLE)
    if file is None and not 0 <= (port := number_in(os.environ, "MASTER_PORT")) < 1 << 16:
        raise ConfigError(f"found MASTER_PORT={port}, expected a port below 65536; correct it")
    if file is None and os.environ["MASTER_ADDR"] == LOOPBACK:
        return _loopback_store(rank, world_size)
    if file is None:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=WITHOUT_WATCHDOG))
        return store
    return _store_by_file(Path(file), rank, world_size)


def _loopback_store(rank: int, world_size: int) -> Store:
    """The ranks' meeting point on this machine; torch's own would listen on every interface."""
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
