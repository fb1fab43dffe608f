"""Binds a rank to the cores beside its GPU, on nodes of several sockets, where nobody else has.

Copies between host and GPU, and what NCCL's threads do, are slower from the other socket. Memory
follows by itself: a page is placed on the node of the core that writes it first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import torch

from foundation.errors import os_error_text
from foundation.files import read_regular

logger = logging.getLogger(__name__)

PCI_DEVICES = Path("/sys/bus/pci/devices")
_LONGEST = 1 << 16  # bytes of a file of the kernel


@dataclass(frozen=True)
class Beside:
    """What the kernel says of a GPU: its NUMA node (-1: unknown) and the cores of that node."""

    node: int
    cores: frozenset[int]


@dataclass(frozen=True)
class Decision:
    """The cores to bind to, None to leave the rank as it is, and why in words."""

    cores: frozenset[int] | None
    reason: str


def decide(beside: Beside, allowed: Set[int], available: Set[int], threads: int) -> Decision:
    """Whether to bind a rank of so many threads, which may use the cores `allowed`.

    `available`: the cores that the node, the job's cgroup or the container has. If fewer are
    allowed, Slurm or someone else has bound the rank, and knows more.
    """
    if beside.node < 0 or not beside.cores:
        return Decision(None, "the kernel names no NUMA node of the GPU")
    here = beside.cores & allowed
    where = f"NUMA node {beside.node}, beside its GPU"
    if allowed < available:
        share = f"{len(here)} of them on {where}"
        return Decision(None, f"bound to {len(allowed)} of {len(available)} cores already, {share}")
    if not here:
        return Decision(None, f"none of its {len(allowed)} cores is on {where}")
    if here == allowed:
        return Decision(None, f"all of its {len(allowed)} cores are on {where}")
    if len(here) < threads:
        return Decision(None, f"{threads} threads, but {len(here)} of its cores on {where}")
    return Decision(frozenset(here), f"{len(here)} of {len(allowed)} cores, those on {where}")


def bind_to_cores_beside_gpu(device: torch.device, threads: int) -> Decision | None:
    """Bind this thread, and those it starts from now on; None without a GPU.

    Logs one line with what was done and why.
    """
    if device.type != "cuda":
        return None
    decision = bind(cores_beside(address_of(device)), threads)
    logger.info("%s: %s", "not bound" if decision.cores is None else "bound", decision.reason)
    return decision


def bind(beside: Beside, threads: int) -> Decision:
    """Decide, and bind this thread if so decided; a container may not allow that."""
    try:
        decision = decide(beside, os.sched_getaffinity(0), available_cores(), threads)
        if decision.cores is not None:
            os.sched_setaffinity(0, decision.cores)
    except OSError as error:
        return Decision(None, os_error_text(error))
    return decision


def address_of(device: torch.device) -> str:
    """The name of a GPU in the kernel's files; "unknown" where this version of torch has none."""
    found = torch.cuda.get_device_properties(device)
    try:
        return pci_address(found.pci_domain_id, found.pci_bus_id, found.pci_device_id)
    except AttributeError:
        return "unknown"


def pci_address(domain: int, bus: int, device: int) -> str:
    """The name of a device's first function in the kernel's files."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def cores_beside(address: str, devices: Path = PCI_DEVICES) -> Beside:
    """What the kernel's files say; node -1 where they say nothing, as in some virtual machines."""
    with contextlib.suppress(OSError, ValueError):
        node = int(_text(devices / address / "numa_node"))
        return Beside(node, parse_cores(_text(devices / address / "local_cpulist")))
    return Beside(-1, frozenset())


def parse_cores(text: str) -> frozenset[int]:
    """The numbers in a list such as `0-3,8,10-11`; ValueError if it is none."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def available_cores() -> frozenset[int]:
    """The most cores that this thread could be bound to: the kernel knows cgroups and containers.

    It is bound to them for a moment, and back.
    """
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(before)
    finally:
        os.sched_setaffinity(0, before)


def _text(path: Path) -> str:
    return read_regular(path, _LONGEST).decode()
