"""Checks that a run and a cluster fit each other, before anything is queued."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS
from foundation.credentials import referenced_variable
from foundation.errors import ConfigError
from foundation.files import url_of
from launcher.slurm.client import Partition
from pretrain.config.resolve import split_of, with_precision
from pretrain.config.run import RunConfig, accumulation_steps, runs_of_phases
from pretrain.costs.cluster import DEVICES, GIB, USABLE, ClusterConfig, NodeRange, seconds_of
from pretrain.costs.memory import advice, checkpoint_bytes, footprint_of


def check_run(
    config: RunConfig,
    cluster: ClusterConfig,
    nodes: NodeRange,
    run_dir: Path,
    *,
    is_dry_run: bool = False,
) -> list[str]:
    """Raise ConfigError if the run cannot work there.

    Returns warnings, a line each. `config` has its vocabulary size. A dry run may be on a host with
    other disks than the cluster's: there, a full disk is a warning.
    """
    ranks = nodes.least * cluster.tasks_per_node
    accumulation_steps(config, ranks)
    config = with_precision(config, best="bf16" if cluster.num_gpus else "fp32")
    if cluster.gpu_model:
        _check_memory(config, cluster, ranks)
    notes = []
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    free, kept = shutil.disk_usage(existing).free, config.checkpoint.keep_last + 1
    if (needed := kept * checkpoint_bytes(config)) > free:
        problem = (
            f"{existing} has {free / GIB:.1f} GiB free, {kept} checkpoints need "
            f"{needed / GIB:.1f} GiB; free disk space, choose another run directory or lower "
            "checkpoint.keep_last"
        )
        if not is_dry_run:
            raise ConfigError(problem)
        notes.append(f"note: {problem}")
    used = usable_nodes(config, cluster.tasks_per_node, nodes.most)
    if used != nodes.most:
        notes.append(
            f"note: of {nodes.most} nodes only {used} would be used, so that "
            f"data.lanes={config.data.lanes} divides evenly"
        )
    return notes


def check_request(
    cluster: ClusterConfig, nodes: NodeRange, partitions: Sequence[Partition]
) -> None:
    """Raise ConfigError if a partition is unknown, or none of those named can ever run the job.

    Of several partitions Slurm takes the one that can start the job first. Also if a variable that
    the job takes from here is not set.
    """
    check_references(cluster)
    names = {partition.name: partition for partition in partitions}
    wanted = cluster.partition.split(",") if cluster.partition else []
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(
            f"partition {unknown[0]!r} is unknown here; this cluster has {', '.join(names)}"
        )
    # sbatch may have a default that sinfo does not show
    chosen = [names[name] for name in wanted] or [each for each in partitions if each.is_default]
    problems = [_never_fits(cluster, nodes, partition) for partition in chosen]
    if problems and all(problems):
        raise ConfigError(problems[0])


def check_references(cluster: ClusterConfig) -> None:
    """Raise ConfigError unless the variables that `environment` refers to are set here."""
    for name, value in cluster.environment.items():
        wanted = referenced_variable(value)
        if wanted is not None and not os.environ.get(wanted):
            raise ConfigError(
                f"environment.{name}={value}, but {wanted} is not set here; export it first"
            )


def _never_fits(cluster: ClusterConfig, nodes: NodeRange, partition: Partition) -> str:
    """Why the partition can never run the job; empty if it can."""
    wanted = {
        "nodes": (nodes.least_of_job, partition.num_nodes),
        "CPUs per node": (cluster.tasks_per_node * cluster.cpus_per_rank, partition.cpus_per_node),
        "GPUs per node": (cluster.num_gpus, partition.gpus_per_node),
    }
    for what, (asked, there) in wanted.items():
        if asked > there:
            return f"found {asked} {what}, partition {partition.name!r} has {there}; request fewer"
    limit = partition.time_limit
    if limit != "n/a" and seconds_of(cluster.time_limit) > seconds_of(limit):
        return (
            f"time_limit={cluster.time_limit} is beyond the {limit} of partition "
            f"{partition.name!r}; request less: a run continues in the next job"
        )
    return ""


def usable_nodes(config: RunConfig, ranks_per_node: int, nodes: int) -> int:
    """The largest number of nodes, up to `nodes`, whose ranks share the lanes evenly.

    0 if there is none.
    """
    for count in range(nodes, 0, -1):
        try:
            for phase in runs_of_phases(config):
                accumulation_steps(phase, count * ranks_per_node)
            return count
        except ConfigError:
            continue
    return 0


def _check_memory(config: RunConfig, cluster: ClusterConfig, ranks: int) -> None:
    capacity = USABLE * (cluster.gpu_memory or DEVICES[cluster.gpu_model].memory)
    needed = footprint_of(config, ranks, on_gpu=True).device
    if needed > capacity:
        raise ConfigError(
            f"a rank needs about {needed / GIB:.1f} GiB, an {cluster.gpu_model} leaves "
            f"{capacity / GIB:.1f} GiB; {advice(config, ranks, capacity, on_gpu=True)} "
            "('pretrain describe' shows the parts)"
        )


def missing_notes(config: RunConfig) -> list[str]:
    """Return a line for every local path that the run reads and that is not there on this host.

    No error: nodes may have disks that this host lacks, or another job may build the corpus first.
    """
    train, validation = (f"{split}/{MANIFEST_NAME}" for split in SPLITS)
    data, corpus = config.data, "finished corpus"
    # (name of the setting, path, the file it must have below it, what it then is)
    read = [("data.path", Path(data.path), validation if data.mixture else train, corpus)]
    for part in data.all_parts:
        read.append((f"mixture of {part.path}", Path(part.path), train, corpus))
    for name, path in config.evaluation.sets.items():
        what = "finished split of a corpus"
        read.append((f"evaluation.sets.{name}", split_of(Path(path)), MANIFEST_NAME, what))
    return [
        f"warning: {name}: found no {what} at {path} on this host; the run is refused when its job "
        "starts, unless the nodes see it there: build it, or correct the path"
        for name, path, needed, what in read
        if url_of(path) is None and not os.path.isfile(path / needed)
    ]
