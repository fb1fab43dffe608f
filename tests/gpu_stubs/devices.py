"""torch.cuda with a number of devices, in this process or, by GPU_STUBS, in ranks of others.

Tensors on a device are host memory that names a device. "nccl" is gloo that takes no other tensors
and, as NCCL does, waits for all ranks when its group is destroyed. GPU_STUBS is JSON: the Stub of
each host, `*` for all others; `site/` on PYTHONPATH installs it in Python processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

VARIABLE = "GPU_STUBS"
SITE = f"{os.path.dirname(os.path.abspath(__file__))}/site"


@dataclass(frozen=True)
class Stub:
    """The GPUs of a host, and what is wrong with them."""

    gpus: int = 8
    cuda_error: str = ""  # of whatever uses CUDA; torch then reports no device
    nccl_error: str = ""  # raised by NCCL when a group is made
    nccl_warning: str = ""  # what it writes before, with NCCL_DEBUG=WARN
    nccl_from_ranks: int = 1  # in groups of this size and larger
    nccl_stalls: bool = False  # instead of an error
    stands_before_init: float = 0.0  # seconds
    rank: int | None = None  # where it stands; None: everywhere
    waits_at_destroy: bool = True


class GpuTensor(torch.Tensor):
    """Host memory on cuda:0."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda", 0)


class _OnGpu(TorchFunctionMode):
    """Makes what is created on a CUDA device, or moved there, a GpuTensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, is_gpu = dict(kwargs or {}), False
        for name, device in [*kwargs.items(), *enumerate(args)]:
            wants = isinstance(device, torch.device) or name == "device"
            if wants and device is not None and torch.device(device).type == "cuda":
                is_gpu = True
                if isinstance(name, int):
                    args = (*args[:name], torch.device("cpu"), *args[name + 1 :])
                else:
                    kwargs[name] = torch.device("cpu")
        result = func(*args, **kwargs)
        return result.as_subclass(GpuTensor) if is_gpu else result


def stub_of(environment: Mapping[str, str]) -> Stub | None:
    """This host's stub."""
    if VARIABLE not in environment:
        return None
    stubs = json.loads(environment[VARIABLE])
    found = stubs.get(socket.gethostname(), stubs.get("*"))
    return None if found is None else Stub(**found)


def install(stub: Stub) -> None:
    """Replace torch.cuda and NCCL in this process, for good; with no GPU only how groups end."""
    _install_groups(stub)
    if not stub.gpus:
        return
    for name, value in cuda_functions(stub).items():
        setattr(torch.cuda, name, value)
    from pretrain.costs.throughput import MATRIX_WIDTHS

    MATRIX_WIDTHS["cuda"] = 64
    generator = torch.Generator
    torch.Generator = lambda device="cpu": generator("cpu")  # pyright: ignore
    _OnGpu().__enter__()


def cuda_functions(stub: Stub) -> dict[str, Any]:
    """What torch.cuda has in place of its own, by name: for `monkeypatch` too."""
    is_usable = bool(stub.gpus) and not stub.cuda_error

    def use(device: Any = None) -> None:
        if not is_usable:
            raise RuntimeError(stub.cuda_error or "No CUDA GPUs are available")
        index = device.index if isinstance(device, torch.device) else device
        if index is not None and index >= stub.gpus:
            raise RuntimeError("CUDA error: invalid device ordinal")

    return {
        "is_available": lambda: is_usable,
        "device_count": lambda: stub.gpus if is_usable else 0,
        # Each an own function: torch's compiler keeps them apart.
        "init": lambda: use(),
        "set_device": lambda device: use(device),
        "synchronize": lambda device=None: use(device),
        "get_device_name": lambda device=None: "NVIDIA H100 (stub)",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
    }


def _install_groups(stub: Stub) -> None:
    """A group of "nccl" takes only GpuTensors, one of "cpu:gloo,cuda:nccl" others too."""
    init, destroy, reduce = dist.init_process_group, dist.destroy_process_group, dist.all_reduce
    backend, group_store, size = "", None, 0

    def init_process_group(name: str, **options: Any) -> None:
        nonlocal backend, group_store, size
        backend, group_store, size = name, options.get("store"), options["world_size"]
        if stub.rank in (None, options["rank"]):
            time.sleep(stub.stands_before_init)
        # Else NCCL guesses the device from the rank in the group, which another rank may have.
        assert "nccl" not in name or options["device_id"].type == "cuda"
        if "nccl" in name and size >= stub.nccl_from_ranks:
            _fail(stub)
        init("gloo", **{**options, "device_id": None})

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if backend == "nccl" and not isinstance(tensor, GpuTensor):
            raise RuntimeError("No backend type associated with device type cpu")
        return reduce(tensor.as_subclass(torch.Tensor), *arguments, **options)

    def destroy_process_group(*arguments: Any) -> None:
        if stub.waits_at_destroy and group_store is not None:
            wait_for_all(group_store, size)
        destroy(*arguments)

    dist.init_process_group = init_process_group
    dist.all_reduce = all_reduce
    dist.destroy_process_group = destroy_process_group


def wait_for_all(store: Any, size: int) -> None:
    """As ncclCommDestroy: return when all ranks have come here."""
    store.add("destroyed", 1)
    with contextlib.suppress(RuntimeError):  # rank 0 has come, and gone with the store
        while store.add("destroyed", 0) < size:
            time.sleep(0.05)


def _fail(stub: Stub) -> None:
    if stub.nccl_warning and (file := os.environ.get("NCCL_DEBUG_FILE")):
        with open(file, "a") as log:
            log.write(f"{socket.gethostname()}:7:7 [0] NCCL WARN {stub.nccl_warning}\n")
    if stub.nccl_stalls:
        time.sleep(3600)
    if stub.nccl_error:
        raise dist.DistBackendError(stub.nccl_error)
