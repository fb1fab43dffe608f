"""The rendezvous of a run's ranks: the store through which they find each other, and its timeouts.

Rank 0 serves the store, and every rank connects to it. MASTER_PORT sets its port. Instead, with
PRETRAIN_PORT_FILE the kernel gives rank 0 a free port, and rank 0 writes it into that file, which
all ranks can read. Then two runs on a host cannot choose the same port.
"""

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
LARGEST_MESH = 64  # ranks: up to here gloo connects each one with all others
MOST_DESCRIPTORS = 1 << 16
LOOPBACK = "127.0.0.1"  # the MASTER_ADDR of ranks on one machine
# How long to wait for all ranks at the rendezvous, and in a collective without a watchdog.
WITHOUT_WATCHDOG = datetime.timedelta(minutes=30)
_LONGEST_SUSPENSION = datetime.timedelta(days=7)


def prepare_descriptors(world_size: int) -> None:
    """Raise this process's limit of open files and connections, to MOST_DESCRIPTORS at most.

    Beyond LARGEST_MESH ranks, also have gloo connect two ranks only when a collective first needs
    it. Then a rank has few connections: two more whenever the number of ranks doubles. By default
    gloo connects all ranks before the first collective, which shows at once that one has died.
    """
    if world_size > LARGEST_MESH:
        os.environ.setdefault(LAZY_VARIABLE, "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def collective_timeout(watchdog_timeout_seconds: float) -> datetime.timedelta:
    """Return how long a collective may take: longer than the watchdog, which first writes stacks.

    The difference allows Slurm to suspend a job for _LONGEST_SUSPENSION. The clocks of collectives
    continue meanwhile; the watchdog's does not.
    """
    if not watchdog_timeout_seconds:
        return WITHOUT_WATCHDOG
    return datetime.timedelta(seconds=watchdog_timeout_seconds) + _LONGEST_SUSPENSION


def rendezvous_store(rank: int, world_size: int) -> Store:
    """Open the store of all ranks, as environment variables say.

    Raises ConfigError for a wrong port; UserError if the port on the loopback interface is taken,
    or if rank 0 does not write the port file in time. Otherwise torch raises its own errors.
    """
    file = os.environ.get(PORT_FILE_VARIABLE)
    if file is None and not 0 <= (port := number_in(os.environ, "MASTER_PORT")) < 1 << 16:
        raise ConfigError(f"found MASTER_PORT={port}, expected a port below 65536; correct it")
    # Under torchrun its agent, the parent of the ranks, serves the store instead of rank 0.
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if file is None and os.environ["MASTER_ADDR"] == LOOPBACK and not is_served:
        return _loopback_store(rank, world_size)
    if file is None:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=WITHOUT_WATCHDOG))
        # An agent that restarts its ranks keeps the store, with the addresses of the dead ranks. A
        # prefix hides them. Not with several nodes: their agents may count restarts differently,
        # and ranks with different prefixes would not find each other.
        one_agent = is_served and os.environ.get("GROUP_WORLD_SIZE") == "1"
        return PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store) if one_agent else store
    return _store_by_file(Path(file), rank, world_size)


def _loopback_store(rank: int, world_size: int) -> Store:
    """Open the store of ranks on this machine, on the loopback interface alone.

    By default torch's server listens on every interface, where other hosts could connect.
    """
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
    os.environ["MASTER_PORT"] = str(store.port)  # for libraries that read it, such as DeepSpeed
    return store


def _port_in(file: Path) -> int:
    try:
        return int(await_text(file, WITHOUT_WATCHDOG.total_seconds()))
    except TimeoutError:
        raise UserError(
            f"{file}: rank 0 has not written its port for {WITHOUT_WATCHDOG}; see its log"
        ) from None
