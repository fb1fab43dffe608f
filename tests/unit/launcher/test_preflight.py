"""`launcher preflight` without ranks; with real ones: tests/integration, on real Slurm:
tests/slurm.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from foundation.errors import UserError
from foundation.files import write_json
from launcher.cli import main
from launcher.commands import preflight
from launcher.commands.preflight import gather, pair_up, srun_line
from pretrain.costs.cluster import ClusterConfig
from pretrain.processes.node_findings import (
    END,
    LinkMeasurement,
    RankMeasurement,
    link_file,
    rank_file,
    round_file,
)


def found(rank: int, node: str) -> RankMeasurement:
    return RankMeasurement(
        rank=rank, node=node, device="CPU", matmul_flops=1e9, disk_bytes=1e9, strays=[]
    )


def answer_rounds(out: Path, silent: set[int]) -> threading.Thread:
    """Stands for the ranks: answers each round in their names, but for the silent ones."""

    def answer() -> None:
        number = 0
        while not (out / END).exists():
            if (out / round_file(number)).exists():
                for group in json.loads((out / round_file(number)).read_text())["groups"]:
                    for rank in set(group) - silent:
                        write_json(
                            out / link_file(number, rank),
                            asdict(LinkMeasurement(bytes_per_second=1e8 + rank)),
                        )
                number += 1
            time.sleep(0.01)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_ranks_that_come_in_time_are_gathered_and_none_at_all_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_ARRIVAL_SECONDS", 0.5)
    write_json(tmp_path / rank_file(1), asdict(found(1, "n2")))
    assert gather(tmp_path, 3, lambda: True) == [found(1, "n2")]
    with pytest.raises(UserError, match="exited before any of them had measured"):
        gather(tmp_path / "empty", 2, lambda: False)


def test_a_node_that_falls_silent_is_left_out_of_the_next_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_ROUND_SECONDS", 0.5)
    ranks = [found(rank, f"n{rank // 2}") for rank in range(8)]
    thread = answer_rounds(tmp_path, silent={5})
    pairs = pair_up(tmp_path, ranks, lambda: True)
    (tmp_path / END).touch()
    thread.join()
    lost = [pair for pair in pairs if pair.problem]
    assert [("n2" in pair.nodes, pair.problem) for pair in lost] == [
        (True, "a rank did not respond")
    ]
    assert len([pair for pair in pairs if "n2" not in pair.nodes]) == 3
    assert all(
        pair.bytes_per_second and pair.bytes_per_second >= 1e8 for pair in pairs if not pair.problem
    )


def test_the_job_asks_for_what_the_cluster_file_says_and_survives_a_lost_node():
    cluster = ClusterConfig(
        partition="gpu",
        gpus_per_node="8",
        cpus_per_rank=4,
        options={"mem": "0"},
        setup=("module load cuda",),
        environment={"NCCL_DEBUG": "WARN"},
    )
    command = srun_line(cluster, 2, "preflight-1a", Path("/shared/out"))
    for flag in (
        "--partition=gpu",
        "--ntasks=16",
        "--gpus-per-node=8",
        "--cpus-per-task=4",
        "--mem=0",
        "--no-kill",
    ):
        assert flag in command
    script = command[-1].splitlines()
    assert script[0] == "module load cuda"
    assert "export NCCL_DEBUG=WARN" in script
    assert script[-1].endswith(" pretrain.processes.node_check /shared/out")


def test_the_check_runs_in_the_containers_that_the_ranks_will_run_in():
    base = ClusterConfig(
        gpus_per_node="2",
        container_image="/images/x.sqsh",
        container_runtime="pyxis",
        container_mounts=("/data",),
        setup=("module load cuda",),
        environment={"NOTE": "two words"},
        options={"exclusive": None, "no-requeue": None},
    )
    out = Path("/shared/out")
    pyxis = srun_line(base, 2, "preflight-1a", out)
    assert "--container-image=/images/x.sqsh" in pyxis
    assert "--container-mounts=/shared/out:/shared/out,/data:/data" in pyxis
    assert "--container-workdir=/shared/out/slurm/code" in pyxis
    assert "--exclusive" in pyxis
    assert "--no-requeue" not in pyxis
    assert "module load cuda" not in pyxis[-1]  # it is not in the container
    assert 'export NOTE="two words"\nexec python3 /shared/out/slurm/code pretrain.' in pyxis[-1]
    apptainer = srun_line(replace(base, container_runtime="apptainer"), 2, "preflight-1a", out)
    assert apptainer[-1].startswith("module load cuda\n")
    inside = "exec apptainer exec --nv --bind=/shared/out --bind=/data"
    assert f"{inside} --pwd=/shared/out/slurm/code /images/x.sqsh python3 /shared" in apptainer[-1]


def test_ranks_that_can_not_start_are_told_with_their_last_line(tmp_path, monkeypatch, capsys):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no torch here\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert main(["preflight", "--local", "--ranks=1", f"--directory={tmp_path}"]) == 2
    assert "measured anything; last line of rank 0: no torch here" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["python"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local", "--ranks=0"], "--ranks=0 must be from 1 to 1,024"),
        (["--cluster=cluster.yaml", "--nodes=99999999999"], "expected a number from 1 to 65,536"),
        (["--local", "--directory=/proc"], "/proc: No such file or directory"),
        (["--cluster=nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--cluster=cluster.yaml", "--nodes=2:4"], "--nodes=2:4: found a range"),
        (["--cluster=cluster.yaml", "--nodes=2+1"], "found no Slurm cluster on this host"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "cluster.yaml").write_text("ranks_per_node: 1\n")
    assert main(["preflight", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["cluster.yaml"]
