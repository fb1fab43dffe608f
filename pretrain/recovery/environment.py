"""What the bits of a result depend on besides the settings: versions, devices and threads.

A resume is bitwise only in the same environment: other versions, instruction sets, GPUs and numbers
of threads add in another order.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import torch

from pretrain.config.engine import DeltaRule
from pretrain.config.run import RunConfig
from pretrain.distributed.threads import describe_waiting
from pretrain.kernels.flash_linear_attention import delta_rule_here, fingerprint
from pretrain.kernels.triton.tiling import table_name

ENVIRONMENT_PACKAGES = ("torch", "numpy", "deepspeed")
# NCCL may sum in another order on other hosts of the same kind, by where they are in the network.
HOSTS_NAME = "hosts of NCCL"
WAITING_NAME = "threads wait"  # changes speed, but no bit of a result


def own_environment(device: torch.device, run: RunConfig) -> dict[str, str]:
    """Return the environment of this process, by name."""
    kernel, is_half = run.engine.attention_kernel, run.engine.number_format != "fp32"
    on_gpu = device.type == "cuda" and bool(run.model.num_deltanet_layers)
    rule, _ = delta_rule_here(kernel, run.model, on_gpu=on_gpu, is_half=is_half)
    return {
        **{package: version(package) for package in ENVIRONMENT_PACKAGES},
        "CUDA": (torch.version.cuda or "unknown") if device.type == "cuda" else "none",
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "attention tiles": table_name() if device.type == "cuda" else "none",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "delta rule": fingerprint() if rule is DeltaRule.FLA else "none",
        HOSTS_NAME: socket.gethostname() if device.type == "cuda" else "none",
        WAITING_NAME: describe_waiting(),
    }


def joint_environment(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the environment of a start, with all values where its ranks differ.

    A single host sums in the same order as any other with its GPUs, so it has no name.
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
