"""The ranks that costs are estimated for: options of a command, or a cluster file. Torch-free."""

from __future__ import annotations

import argparse
from pathlib import Path

from data_pipeline.errors import ConfigError
from pretrain.costs.cluster import load_cluster
from pretrain.costs.devices import DEVICES, MOST_RANKS, Hardware
from pretrain.costs.node_range import fixed_nodes


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
        help="ranks per node (default: the cluster's, else 1, or engine.sequence_ranks)",
    )
    parser.add_argument(
        "--gpu",
        type=lambda name: {each.lower(): each for each in DEVICES}.get(name.lower(), name),
        choices=sorted(DEVICES),
        help="accelerator type of a rank (default: the cluster's, else cpu)",
    )


def hardware_of(arguments: argparse.Namespace, fewest_ranks: int = 1) -> Hardware:
    """Return the hardware of the cluster file, if one is given; the other options win over it.

    Without either a node has `fewest_ranks`.
    """
    nodes = fixed_nodes(arguments.nodes).least
    if (ranks := arguments.gpus_per_node) is not None and not 1 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--gpus-per-node={ranks} must be from 1 to {MOST_RANKS:,}")
    gpu, node = arguments.gpu, None
    if arguments.cluster is not None:
        node = load_cluster(arguments.cluster)
        if node.num_gpus and not (gpu or node.gpu_model):
            raise ConfigError(
                f"{arguments.cluster}: found no gpu, expected A100, H100 or H200; "
                "set it, or use --gpu"
            )
        ranks, gpu = ranks or node.tasks_per_node, gpu or node.gpu_model
    return Hardware(nodes=nodes, ranks_per_node=ranks or fewest_ranks, name=gpu or "cpu", node=node)
