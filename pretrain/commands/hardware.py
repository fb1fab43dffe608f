"""The flags of the hardware that costs are estimated for. Torch-free."""

import argparse
from pathlib import Path

from foundation.sizes import amount_of
from pretrain.config.devices import DEVICES
from pretrain.costs.hardware import Hardware, chosen_hardware


def add_hardware_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options that `hardware_of` reads; they win over those of the cluster file."""
    add, size, speed = parser.add_argument, amount_of("bytes"), amount_of("FLOPs")

    def device(name: str) -> str:
        return {known.lower(): known for known in DEVICES}.get(name.lower(), name)

    add("--cluster", type=Path, help="cluster file (configs/clusters/*.yaml) with GPUs per node")
    add("--nodes", default="1", metavar="N|N+S", help="nodes that train, and spare ones: 4+1")
    add("--gpus-per-node", "--gpus", "--ranks", type=int, help="ranks per node (default 1)")
    add("--gpu", type=device, choices=sorted(DEVICES), metavar="NAME", help="device (default: cpu)")
    add("--gpu-memory", type=size, default=0.0, metavar="N", help="of a GPU, such as 40GiB")
    add("--gpu-flops", type=speed, default=0.0, metavar="N", help="a GPU's peak, such as 400T")


def hardware_of(arguments: argparse.Namespace) -> Hardware:
    """Return the hardware that the options describe; they win over the cluster file, if any."""
    return chosen_hardware(
        cluster=arguments.cluster,
        nodes=arguments.nodes,
        ranks_per_node=arguments.gpus_per_node,
        gpu=arguments.gpu,
        memory=arguments.gpu_memory,
        flops=arguments.gpu_flops,
    )
