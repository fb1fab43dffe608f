"""The ranks that costs are estimated for: options of a command, or a cluster file. Torch-free."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.errors import ConfigError
from foundation.settings import amount_of
from pretrain.config.cluster import MOST_RANKS, fixed_nodes, load_cluster
from pretrain.config.devices import DEVICES
from pretrain.costs.hardware import Hardware


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
    nodes = fixed_nodes(arguments.nodes).least
    if (ranks := arguments.gpus_per_node) is not None and not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--gpus-per-node={ranks} must be from 1 to {MOST_RANKS:,}")
    gpu, node = arguments.gpu, None
    if arguments.cluster is not None:
        node = load_cluster(arguments.cluster)
        if node.num_gpus and not (gpu or node.gpu_model):
            raise ConfigError(
                f"{arguments.cluster}: found no gpu, expected one of "
                f"{', '.join(name for name in DEVICES if name != 'cpu')}; set it, or use --gpu"
            )
        ranks, gpu = ranks or node.tasks_per_node, gpu or node.gpu_model
    memory, flops = arguments.gpu_memory, arguments.gpu_flops
    if (memory or flops) and not gpu:
        raise ConfigError("--gpu-memory and --gpu-flops are of a GPU; add --gpu, or --cluster FILE")
    return Hardware(
        nodes=nodes,
        ranks_per_node=ranks or 1,
        name=gpu or "cpu",
        node=node,
        memory=memory or (node.gpu_memory if node else 0.0),
        flops=flops or (node.gpu_flops if node else 0.0),
    )
