"""What the bits of a result depend on besides the settings: versions, devices and threads.

A resume is bitwise only in the same environment: other versions, instruction sets, GPUs and numbers
of threads add in another order.
"""

import inspect
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from pretrain.config.run import RunConfig
from pretrain.distributed.threads import describe_waiting
from pretrain.kernels.triton.tiling import table_name
from pretrain.rundir.code_version import code_digest

ENVIRONMENT_PACKAGES = ("torch", "numpy", "deepspeed")
# NCCL may sum in another order on other hosts of the same kind, by where they are in the network.
HOSTS_NAME = "hosts of NCCL"
WAITING_NAME = "threads wait"  # changes speed, but no bit of a result


def own_environment(device: torch.device, run: RunConfig) -> dict[str, str]:
    """Return the environment of this process, by name."""
    of_kinds: dict[str, str] = {}
    for mixer in run.model.mixers_used:
        of_kinds |= mixer.environment(run.model, run.engine, device.type == "cuda")
        if mixer.distribution:
            root = Path(inspect.getfile(type(mixer))).parents[mixer.package.count(".") + 1]
            code = code_digest(root, [mixer.package.partition(".")[0]])
            of_kinds[f"layers of kind {mixer.kind}"] = f"{mixer.distribution}+{code}"
    return {
        **{package: version(package) for package in ENVIRONMENT_PACKAGES},
        "CUDA": (torch.version.cuda or "unknown") if device.type == "cuda" else "none",
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "attention tiles": table_name() if device.type == "cuda" else "none",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **of_kinds,
        HOSTS_NAME: socket.gethostname() if device.type == "cuda" else "none",
        WAITING_NAME: describe_waiting(),
    }


def joint_environment(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the environment of a start, with all values where its ranks differ.

    A single host sums in the same order as any other with its GPUs, so its name is left out.
    """
    environment = {name: ", ".join(sorted({rank[name] for rank in ranks})) for name in ranks[0]}
    if environment[HOSTS_NAME] == ranks[0][HOSTS_NAME]:
        environment[HOSTS_NAME] = "one"
    return environment


def environment_changes(
    before: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return what differs and may change bits, where both are known: name -> (before, now)."""
    return {
        name: (before[name], now[name])
        for name in now
        if name in before and before[name] != now[name] and name != WAITING_NAME
    }
