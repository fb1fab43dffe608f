"""`launcher new-cluster`: a commented cluster file for the Slurm of this machine; `launcher
settings`: what each of its settings means."""

import argparse
import os
from pathlib import Path

from foundation.cli import add_prefix, show_settings
from foundation.errors import ConfigError, UserError
from foundation.files import refuse_overwrite, write_new
from foundation.yaml_files import require_yaml_name
from launcher.slurm.client import Partition, Slurm
from pretrain.config.cluster import ClusterConfig, time_limit_seconds

LONGEST_JOB = "24:00:00"
SIGNAL_SECONDS = 300
HERE = "this machine"
OF_GPUS = """\
  NCCL_DEBUG: WARN
  TORCH_DIST_USE_NCCL2: "0"  # torch's former NCCL backend, until the new one is tested here
"""
add_settings_arguments = add_prefix


def run_settings(arguments: argparse.Namespace) -> int:
    """Print the settings of a cluster file."""
    return show_settings(ClusterConfig, arguments.prefix)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher new-cluster`."""
    add = parser.add_argument
    add("cluster", type=Path, metavar="CLUSTER.yaml", help="file to write; must not exist")
    add("--partition", metavar="NAME", help="partition to describe (default: Slurm's default)")


def run(arguments: argparse.Namespace) -> int:
    """Write the file; print where its numbers come from."""
    require_yaml_name(arguments.cluster)
    refuse_overwrite(arguments.cluster)
    partition = _chosen_partition(arguments.partition)
    write_new(arguments.cluster, as_file(partition, arguments.cluster))
    source = f"partition {partition.name}" if partition else f"{HERE}, as there is no Slurm here"
    print(
        f"{arguments.cluster}: nodes as in {source}; next: launcher submit EXPERIMENT "
        f"--cluster {arguments.cluster} --dry-run"
    )
    return 0


def _chosen_partition(name: str | None) -> Partition | None:
    """Return the named partition, or the default one; None without Slurm."""
    try:
        partitions = Slurm().partitions()
    except UserError:
        if name:
            raise
        return None
    chosen = [one for one in partitions if (one.name == name if name else one.is_default)]
    if name and not chosen:
        names = ", ".join(partition.name for partition in partitions)
        raise ConfigError(f"--partition={name} is unknown here; this cluster has {names}")
    return (chosen or partitions or [None])[0]


def as_file(partition: Partition | None, file: Path) -> str:
    """Return a commented cluster file for nodes like the partition's, or like this machine."""
    cores = partition.cpus_per_node if partition else os.cpu_count() or 1
    gpus = partition.gpus_per_node if partition else 0
    ranks = gpus or min(2, cores)
    limit = partition.time_limit if partition else "n/a"
    if limit == "n/a" or time_limit_seconds(limit) > time_limit_seconds(LONGEST_JOB):
        limit = LONGEST_JOB
    signal = round(min(SIGNAL_SECONDS, time_limit_seconds(limit) / 2))
    kind = (
        f"gpus_per_node: {gpus}  # each gets a rank; with Slurm's type of GPU: h100:{gpus}\n"
        "# gpu: H100  # or A100, L40S, ...: to check memory and estimate time before a start"
        if gpus
        else f"ranks_per_node: {ranks}  # processes on each node, which has no GPUs"
    )
    name = f'"{partition.name}"' if partition else '""'
    return f"""\
# Nodes as in {partition.name if partition else HERE}, written by 'launcher new-cluster'.
# What each setting means, and all others: docs/settings.md, or 'launcher settings'.
#   launcher submit EXPERIMENT --cluster {file} --nodes 1 --dry-run  print the batch script
#   launcher preflight --cluster {file} --nodes 2                    find slow and broken nodes
partition: {name}  # empty: the cluster's default; several: "main,urgent"
{kind}
cpus_per_rank: {max(1, cores // ranks)}
time_limit: "{limit}"  # of one job; the run continues in the next one
signal_seconds: {signal}  # before the limit: two steps and a checkpoint have to fit
options: {{}}  # other options of sbatch, such as account: NAME or mem: "0"
setup: []  # shell lines run once on the first node, such as 'source /opt/site.sh'
environment:
  OMP_NUM_THREADS: "{max(1, cores // ranks)}"
{OF_GPUS if gpus else ""}\
  # NCCL_SOCKET_IFNAME: ib0  # interfaces that ranks meet over, where nodes have several
  # GLOO_SOCKET_IFNAME: ib0  # unset: the one that the host's name resolves to
# container_image: /shared/images/pretrain.sqsh  # with this project's dependencies; or a .sif file
# container_mounts: [/shared]
"""
