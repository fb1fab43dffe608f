"""The flags that name the ranks that costs are estimated for, or a cluster file. Torch-free."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.sizes import amount_of
from pretrain.config.devices import DEVICES
from pretrain.costs.hardware import Hardware, chosen_hardware


def add_hardware_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options that `hardware_of` reads."""
    parser.add_argument(
        "--cluster", type=Path, help="cluster file (configs/clusters/*.yaml) with GPUs per node"
    )
    parser.add_argument(
        "--nodes",
        default="1",
        metavar="N|N+S",
        help="nodes; of 4+1, with a spare one, 4 train and count (default 1)",
    )
    parser.add_argument(
        "--gpus-per-node",
        "--gpus",
        type=int,
        help="ranks per node (default: the cluster's, else 1)",
    )
    parser.add_argument(
        "--gpu",
        type=lambda name: {each.lower(): each for each in DEVICES}.get(name.lower(), name),
        choices=sorted(DEVICES),
        metavar="NAME",
        help=f"a rank's device: {', '.join(sorted(DEVICES))} (default: the cluster's, else cpu)",
    )
    for name, unit, words in (
        ("--gpu-memory", "bytes", "memory of a GPU, such as 40GiB"),
        ("--gpu-flops", "FLOPs", "peak of a GPU in FLOPs per second, such as 400T"),
    ):
        words += " (default: the cluster's, else the data sheet's)"
        parser.add_argument(name, type=amount_of(unit), default=0.0, metavar="N", help=words)


def hardware_of(arguments: argparse.Namespace) -> Hardware:
    """Return the hardware of the cluster file, if one is given; the other options win over it."""
    return chosen_hardware(
        cluster=arguments.cluster,
        nodes=arguments.nodes,
        ranks_per_node=arguments.gpus_per_node,
        gpu=arguments.gpu,
        memory=arguments.gpu_memory,
        flops=arguments.gpu_flops,
    )
