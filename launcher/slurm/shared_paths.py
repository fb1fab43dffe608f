"""Whether the nodes of a cluster will see what a job reads, as far as the submitting host knows.

A guess by the type of the file system: disks of one host (ext4, xfs, tmpfs, ...) are not shared,
and every other type (nfs, lustre, gpfs, ...) may be. So an exported local disk is reported where it
is exported, and a host that is the only node of its cluster is warned without need.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.corpora.manifest import MANIFEST_NAME, SPLITS
from data_pipeline.files import url_of
from pretrain.config.evaluation_sets import split_of
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig

LOCAL_TYPES = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "apfs")
    + ("tmpfs", "ramfs", "overlay", "squashfs", "iso9660", "vfat", "exfat", "ntfs", "ntfs3")
)
_MOUNTS = Path("/proc/self/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")  # a space, tab, line break or backslash in a mount point


@dataclass(frozen=True)
class Mount:
    place: Path
    type: str

    @property
    def is_local(self) -> bool:
        """Whether the file system belongs to one host."""
        return self.type in LOCAL_TYPES


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts that the text of /proc/self/mounts lists, later ones last."""
    lines = [line.split() for line in text.splitlines()]
    return [
        Mount(Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), line[1])), line[2])
        for line in lines
        if len(line) > 2
    ]


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that holds the path, which need not exist yet."""
    holding = [mount for mount in mounts if path.is_relative_to(mount.place)]
    # Of several at one place the last hides the others.
    return max(reversed(holding), key=lambda mount: len(mount.place.parts), default=None)


def paths_of(config: RunConfig, run_dir: Path, python: str) -> dict[str, Path]:
    """Return what the ranks read and write, by name; URLs are read over the network."""
    named = {
        "run directory": run_dir,
        "data.path": config.data.path,
        **{f"mixture of {part.path}": part.path for part in config.data.all_parts},
        **{f"evaluation.sets.{name}": path for name, path in config.evaluation.sets.items()},
    }
    if config.initial_weights is not None:
        named["initial_weights"] = config.initial_weights
    # The code is copied into the run directory; what it imports is where this Python is.
    named["Python"] = Path(python)
    return {name: Path(path) for name, path in named.items() if url_of(Path(path)) is None}


def missing_notes(config: RunConfig) -> list[str]:
    """Return a line for every local path that the run reads and that is not there on this host.

    No error: nodes may have disks that this host lacks, or another job may build the corpus first.
    """
    return [
        f"warning: {name}: found no {what} at {path} on this host; the run is refused when its job "
        "starts, unless the nodes see it there: build it, or correct the path"
        for name, (path, needed, what) in _read_paths(config).items()
        if url_of(path) is None and not os.path.isfile(path / needed)
    ]


def _read_paths(config: RunConfig) -> dict[str, tuple[Path, str, str]]:
    """By name of the setting: a path, the file that it must have below it, and what it then is."""
    train, validation = (f"{split}/{MANIFEST_NAME}" for split in SPLITS)
    data, corpus = config.data, "finished corpus"
    read = {"data.path": (Path(data.path), validation if data.mixture else train, corpus)}
    for part in data.all_parts:
        read[f"mixture of {part.path}"] = (Path(part.path), train, corpus)
    for name, path in config.evaluation.sets.items():
        split = split_of(Path(path))
        read[f"evaluation.sets.{name}"] = (split, MANIFEST_NAME, "finished split of a corpus")
    return read


def path_notes(
    config: RunConfig,
    cluster: ClusterConfig,
    run_dir: Path,
    python: str,
    mounts: Sequence[Mount] | None = None,
) -> list[str]:
    """Return a line for every path that nodes or containers seem not to see."""
    paths = paths_of(config, run_dir, python)
    if cluster.container_image:
        del paths["Python"]  # the container has its own
    if mounts is None:
        mounts = parse_mounts(_MOUNTS.read_text()) if _MOUNTS.exists() else []
    notes = [*_local_notes(paths, mounts)]
    if cluster.container_image:
        notes += [*_image_notes(cluster.container_image), *_unmounted(paths, cluster, run_dir)]
    return notes


def _local_notes(paths: Mapping[str, Path], mounts: Sequence[Mount]) -> Iterator[str]:
    for name, path in paths.items():
        mount = mount_of(path.resolve(), mounts)
        if mount is not None and mount.is_local:
            yield (
                f"note: {name}: {path} is on {mount.type} (mounted at {mount.place}), which other "
                "hosts usually do not see; put it on a disk that all nodes share"
            )


def _image_notes(image: str) -> Iterator[str]:
    is_path = "://" not in image and (image.startswith("/") or image.endswith((".sqsh", ".sif")))
    if is_path and not Path(image).exists():
        yield (
            f"note: container_image: {image} is not there on this host; correct it, unless the "
            "nodes have it"
        )


def _unmounted(paths: Mapping[str, Path], cluster: ClusterConfig, run_dir: Path) -> Iterator[str]:
    mounted = [run_dir, *map(Path, cluster.container_mounts)]
    for name, path in paths.items():
        if not any(path.is_relative_to(place) for place in mounted):
            yield (
                f"note: {name}: {path} is below none of container_mounts, so the ranks would not "
                "see it in the container; add its directory"
            )
