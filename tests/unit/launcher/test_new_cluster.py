"""`launcher new-cluster` writes a file that submits as it is; on a real Slurm: tests/slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import main
from launcher.commands.new_cluster import as_file
from launcher.slurm.client import Partition
from launcher.slurm.job_checks import check_request
from launcher.slurm.sbatch import Job, render
from pretrain.costs.cluster import NodeRange, load_cluster


@pytest.mark.parametrize(
    ("gpus", "cpus", "limit", "expected"),
    [
        (8, 96, "7-00:00:00", ("--gpus-per-node=8", "--cpus-per-task=12", "--time=24:00:00")),
        (0, 1, "n/a", ("--ntasks-per-node=1", "--cpus-per-task=1", "--partition=main")),
        (0, 8, "0:04:00", ("--ntasks-per-node=2", "--cpus-per-task=4", "--signal=B:USR1@120")),
        (0, 8, "infinite", ("--time=24:00:00", "--partition=main")),
    ],
)
def test_the_file_for_a_partition_is_one_that_it_accepts(gpus, cpus, limit, expected, tmp_path):
    partition = Partition(
        name="main",
        is_default=True,
        num_nodes=4,
        cpus_per_node=cpus,
        gpus_per_node=gpus,
        time_limit=limit,
    )
    file = tmp_path / "c.yaml"
    file.write_text(as_file(partition, file))
    cluster, nodes = load_cluster(file), NodeRange(2, 2)
    check_request(cluster, nodes, [partition])
    script = render(
        Job(
            name="x",
            run_dir=Path("/runs/x"),
            code=Path("/runs/x/code"),
            python="python3",
            nodes=nodes,
            cluster=cluster,
            attempts_without_progress=3,
        )
    )
    for option in expected:
        assert f"#SBATCH {option}\n" in script


def test_without_slurm_the_file_is_for_nodes_like_this_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["new-cluster", "c.yaml"]) == 0
    assert "this machine, as there is no Slurm here" in capsys.readouterr().out
    (tmp_path / "x.yaml").write_text("model: {vocab_size: 300}\n")
    assert main(["submit", "x.yaml", "--cluster", "c.yaml", "--dry-run"]) == 0
    assert "#SBATCH --time=24:00:00" in capsys.readouterr().out
    written = Path("c.yaml").read_text()
    assert main(["new-cluster", "c.yaml"]) == 2
    assert "c.yaml exists already" in capsys.readouterr().err
    assert main(["new-cluster", "d"]) == 2
    assert "d does not end in .yaml; name it d.yaml" in capsys.readouterr().err
    assert main(["new-cluster", "d.yaml", "--partition=main"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert Path("c.yaml").read_text() == written
    assert {path.name for path in tmp_path.iterdir()} == {"c.yaml", "x.yaml"}
