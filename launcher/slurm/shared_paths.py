"""Whether what a job reads is there, as far as the submitting host knows."""

from __future__ import annotations

import os
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS
from foundation.files import url_of
from pretrain.config.resolve import split_of
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig


def missing_notes(config: RunConfig) -> list[str]:
    """Return a line for every local path that the run reads and that is not there on this host.

    No error: nodes may have disks that this host lacks, or another job may build the corpus first.
    """
    return [
        f"warning: {name}: found no {what} at {path} on this host; the run is refused when its job "
        "starts, unless the nodes see it there: build it, or correct the path"
        for name, (path, needed, what) in _read_paths(config).items()
        if not os.path.isfile(path / needed)
    ]


def unmounted_notes(config: RunConfig, cluster: ClusterConfig, run_dir: Path) -> list[str]:
    """Return a line for every local path that the ranks would not see in the cluster's
    container."""
    if not cluster.container_image:
        return []
    mounted = [run_dir, *map(Path, cluster.container_mounts)]
    paths = {name: path for name, (path, _, _) in _read_paths(config).items()}
    if config.initial_weights is not None:
        paths["initial_weights"] = Path(config.initial_weights)
    return [
        f"note: {name}: {path} is below none of container_mounts, so the ranks would not see it in "
        "the container; add its directory"
        for name, path in paths.items()
        if url_of(path) is None and not any(map(path.is_relative_to, mounted))
    ]


def _read_paths(config: RunConfig) -> dict[str, tuple[Path, str, str]]:
    """By name of the setting: a local path, the file it must have below it, and what it then is."""
    train, validation = (f"{split}/{MANIFEST_NAME}" for split in SPLITS)
    data, corpus = config.data, "finished corpus"
    read = {"data.path": (Path(data.path), validation if data.mixture else train, corpus)}
    for part in data.all_parts:
        read[f"mixture of {part.path}"] = (Path(part.path), train, corpus)
    for name, path in config.evaluation.sets.items():
        split = split_of(Path(path))
        read[f"evaluation.sets.{name}"] = (split, MANIFEST_NAME, "finished split of a corpus")
    return {name: entry for name, entry in read.items() if url_of(entry[0]) is None}
