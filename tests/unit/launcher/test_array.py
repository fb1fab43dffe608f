from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from launcher.slurm import client as slurm
from launcher.slurm.sbatch import Job, render_array
from pretrain.costs.cluster import ClusterConfig, NodeRange

JOB = Job(
    name="grid-1a2b",
    run_dir=Path("/runs/grid/slurm/grid-1a2b"),
    code=Path("/runs/grid/slurm/grid-1a2b/code"),
    python="/bin/echo",
    nodes=NodeRange(1, 1),
    cluster=ClusterConfig(ranks_per_node=2),
    attempts_without_progress=3,
)


def test_a_task_of_an_array_runs_its_own_cell_which_has_a_link_to_its_log(tmp_path):
    runs = [tmp_path / "narrow", tmp_path / "with space"]
    script = render_array(JOB, runs, at_a_time=2)
    assert "#SBATCH --array=0-1%2\n" in script
    assert "#SBATCH --nodes=1\n" in script
    (runs[1] / "logs").mkdir(parents=True)
    environment = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "17"}
    environment["PATH"] = "/usr/bin:/bin"
    result = subprocess.run(
        ["bash", "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    then = f"{runs[1]} --attempts-without-progress=3\n"
    assert result.stdout == f"{JOB.code} launcher.slurm.batch_process {then}"
    assert (
        runs[1] / "logs" / "slurm-17_1.log"
    ).readlink() == JOB.run_dir / "logs" / "slurm-17_1.log"


def test_an_array_without_a_limit_has_none():
    assert "#SBATCH --array=0-0\n" in render_array(JOB, [Path("/runs/a")], at_a_time=None)


def test_arrays_that_share_a_limit_run_one_after_the_other():
    script = render_array(JOB, [Path("/runs/a"), Path("/runs/b")], at_a_time=1, after="17")
    assert "#SBATCH --dependency=afterany:17\n" in script


def test_a_task_of_an_array_is_known_by_its_index(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="is for batch scripts"):
        slurm.own_job()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert slurm.own_job() == "17"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm.own_job() == "17_3"
