"""How the ranks' Python is started: in the cluster's container, or by the nodes' own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.setting_fields import assert_never
from pretrain.costs.cluster import ClusterConfig


def in_container(
    cluster: ClusterConfig,
    task: Sequence[str],
    mounts: Sequence[Path],
    workdir: Path,
    python: str = sys.executable,
) -> tuple[list[str], list[str]]:
    """The flags of srun, and the command, that run Python with the arguments `task`.

    In the cluster's container if it has one; by `python` of the nodes otherwise.
    """
    if not cluster.container_image:
        return [], [python, *task]
    command = [cluster.container_python, *task]
    seen = [str(mount) for mount in (*mounts, *cluster.container_mounts)]
    match cluster.container_runtime:
        case "":
            raise AssertionError("ClusterConfig refuses an image without a runtime")
        case "pyxis":
            flags = [
                f"--container-image={cluster.container_image}",
                f"--container-mounts={','.join(f'{path}:{path}' for path in seen)}",
                f"--container-workdir={workdir}",
            ]
            return flags, command
        case "apptainer":
            binds = [f"--bind={path}" for path in seen]
            gpus = ["--nv"] if cluster.num_gpus else []
            image = cluster.container_image
            apptainer = ["apptainer", "exec", *gpus, *binds, f"--pwd={workdir}", image]
            return [], [*apptainer, *command]
        case _:
            assert_never(cluster.container_runtime)
