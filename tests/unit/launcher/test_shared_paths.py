from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.config import MixturePart
from launcher.slurm.shared_paths import missing_notes, mount_of, parse_mounts, path_notes
from pretrain.config.data import DataConfig
from pretrain.config.run import RunConfig
from pretrain.costs.cluster import ClusterConfig

MOUNTS = parse_mounts(
    "/dev/sda1 / ext4 rw 0 0\n"
    "server:/home /home nfs4 rw 0 0\n"
    "tmpfs /home/fast tmpfs rw 0 0\n"
    "10.0.0.1@tcp:/big /big\\040data lustre rw 0 0\n"
    "\n"
)
CLUSTER = ClusterConfig(ranks_per_node=1)
RUN_DIR = Path("/home/runs/a")


def notes(data: str, cluster: ClusterConfig = CLUSTER, run_dir: Path = RUN_DIR) -> list[str]:
    run = RunConfig(data=DataConfig(path=Path(data)))
    return path_notes(run, cluster, run_dir, "/home/env/bin/python", MOUNTS)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/etc/x", "ext4"),
        ("/home/runs", "nfs4"),
        ("/home/fast/x", "tmpfs"),
        ("/home/faster", "nfs4"),
        ("/big data/corpus", "lustre"),
    ],
)
def test_a_path_is_on_the_innermost_mount_that_holds_it(path, kind):
    mount = mount_of(Path(path), MOUNTS)
    assert mount is not None
    assert mount.type == kind


def test_paths_on_disks_of_one_host_are_noted_and_shared_ones_are_not():
    assert notes("/big data/corpus") == []
    assert notes("s3://bucket/corpus") == []
    (data,) = notes("/srv/corpus")
    assert "data.path: /srv/corpus is on ext4 (mounted at /)" in data
    (run_dir,) = notes("/big data/corpus", run_dir=Path("/home/fast/run"))
    assert "run directory: /home/fast/run is on tmpfs" in run_dir


def test_corpora_that_are_not_on_this_host_are_warned_of_and_urls_are_not(tmp_path):
    def finished(directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / "manifest.json").touch()
        return directory

    run = RunConfig(data=DataConfig(path=tmp_path / "books"))
    (warning,) = missing_notes(run)
    assert warning.startswith(
        f"warning: data.path: found no finished corpus at {tmp_path}/books on this host; "
    )
    finished(tmp_path / "books" / "train")
    assert missing_notes(run) == []
    paths = (tmp_path / "books", Path("s3://bucket/web"))
    parts = tuple(MixturePart(path=path, weight=1.0) for path in paths)
    mixed = replace(run, data=replace(run.data, mixture=parts))
    assert len(missing_notes(mixed)) == 1, "the validation split is of data.path"
    finished(tmp_path / "books" / "validation")
    assert missing_notes(mixed) == []
    sets = {"books": tmp_path / "books", "code": tmp_path / "code"}
    evaluated = replace(run, evaluation=replace(run.evaluation, sets=sets))
    (warning,) = missing_notes(evaluated)
    assert (
        f"evaluation.sets.code: found no finished split of a corpus at {tmp_path}/code" in warning
    )


def test_an_image_that_is_not_there_and_data_that_is_not_mounted_are_noted(tmp_path):
    image = tmp_path / "x.sqsh"
    inside = replace(CLUSTER, container_image=str(image), container_runtime="pyxis")
    missing, unmounted = notes("/big data/corpus", inside)
    assert f"container_image: {image} is not there" in missing
    assert "data.path: /big data/corpus is below none of container_mounts" in unmounted
    image.touch()
    assert notes("/big data/corpus", replace(inside, container_mounts=("/big data",))) == []
    remote = replace(inside, container_image="docker://x/y:1", container_mounts=("/big data",))
    assert notes("/big data/corpus", remote) == []
