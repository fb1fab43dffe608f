"""`launcher preflight` without ranks; with real ones: tests/integration, on real Slurm:
tests/slurm."""

import json
import sys
import threading
import time
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import pytest

from foundation.files import write_json
from launcher.cli import main
from launcher.commands import preflight
from launcher.commands.preflight import PairResult, pair_rounds, pair_up, rate_nodes, srun_line
from pretrain.config.cluster import ClusterConfig
from pretrain.processes.node_check import failure_reason
from pretrain.processes.node_findings import (
    END,
    LinkMeasurement,
    RankMeasurement,
    link_file,
    round_file,
)

LATE = "rank 5 did not respond"
NODES = ["n1", "n2", "n3", "n4"]
FAST, SLOW = 100e6, 20e6


def found(rank: int, node: str, matmul: float = 50e9, disk: float | None = 1e9) -> RankMeasurement:
    return RankMeasurement(rank=rank, node=node, device="CPU", matmul_flops=matmul, disk_bytes=disk)


def answer_rounds(out: Path, silent: set[int]) -> threading.Thread:
    """Stands for the ranks: answers each round in their names, but for the silent ones."""

    def answer() -> None:
        number = 0
        while not (out / END).exists():
            if (out / round_file(number)).exists():
                for group in json.loads((out / round_file(number)).read_text())["groups"]:
                    for rank in set(group) - silent:
                        measured = asdict(LinkMeasurement(bytes_per_second=1e8 + rank))
                        write_json(out / link_file(number, rank), measured)
                number += 1
            time.sleep(0.01)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_node_that_falls_silent_is_left_out_of_the_next_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_ROUND_SECONDS", 5.0)  # of the round with n2
    ranks = [found(rank, f"n{rank // 2}") for rank in range(8)]
    thread = answer_rounds(tmp_path, silent={5})
    pairs = pair_up(tmp_path, ranks, lambda: True)
    (tmp_path / END).touch()
    thread.join()
    lost = [pair for pair in pairs if pair.problem]
    assert [("n2" in pair.nodes, pair.problem) for pair in lost] == [(True, LATE)]
    assert [pair.nodes for pair in pairs if len(pair.nodes) > 2] == [("n0", "n1", "n3")]
    assert len([pair for pair in pairs if "n2" not in pair.nodes]) == 4
    assert all((pair.bytes_per_second or 0) >= 1e8 for pair in pairs if not pair.problem)


def test_the_job_asks_for_what_the_cluster_file_says_and_survives_a_lost_node():
    cluster = ClusterConfig(
        partition="gpu", gpus_per_node="8", cpus_per_rank=4, options={"mem": "0"},
        setup=("module load cuda",), environment={"NCCL_DEBUG": "WARN"},
    )  # fmt: skip
    command = srun_line(cluster, 2, "preflight-1a", Path("/shared/out"))
    flags = {"--partition=gpu", "--ntasks=16", "--gpus-per-node=8", "--cpus-per-task=4"}
    assert flags | {"--mem=0", "--no-kill"} <= set(command)
    script = command[-1].splitlines()
    assert script[0] == "module load cuda"
    assert "export NCCL_DEBUG=WARN" in script
    assert script[-1].endswith(" pretrain.processes.node_check /shared/out")


def test_the_check_runs_in_the_containers_that_the_ranks_will_run_in():
    base = ClusterConfig(
        gpus_per_node="2", container_image="/images/x.sqsh", setup=("module load cuda",),
        options={"exclusive": None, "no-requeue": None},
    )  # fmt: skip
    out = Path("/shared/out")
    *pyxis, script = srun_line(base, 2, "preflight-1a", out)
    assert {"--container-image=/images/x.sqsh", "--exclusive"} <= set(pyxis)
    assert "--no-requeue" not in pyxis
    assert "module load cuda" not in script  # it is not in the container
    assert "exec python3 /shared/out/slurm/code pretrain." in script
    *_, script = srun_line(replace(base, container_image="/images/x.sif"), 2, "preflight-1a", out)
    assert script.startswith("module load cuda\n")
    assert "exec apptainer exec --nv --bind=/shared/out --pwd=/shared/out/slurm/code " in script


def test_ranks_that_can_not_start_are_told_with_their_last_line(tmp_path, monkeypatch, capsys):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no-torch-here\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert main(["preflight", "--local", "--ranks=1", f"--directory={tmp_path}"]) == 2
    assert "no-torch-here" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["python"]


def test_a_node_with_seven_of_eight_ranks_is_broken():
    ranks = [found(rank, f"n{1 + rank // 8}") for rank in range(15)]
    well, broken = rate_nodes(ranks, [], missing=[], ranks_of_node=8)
    assert (well.verdict, broken.verdict) == ("ok", "broken")
    assert broken.problems == ("7 of 8 ranks responded",)


NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7\nncclSystemError: System call "
    "(e.g. socket, malloc) or external library call failed.\nLast error:\n"
)
MEMLOCK = "Call to ibv_create_cq failed with error Cannot allocate memory"
SHM = "Error while creating shared memory segment /dev/shm/nccl-4gB2 (size 33030528)"


@pytest.mark.parametrize(
    ("error", "log", "reason"),
    [
        (f"{NCCL}{MEMLOCK}", "", f"NCCL: {MEMLOCK}"),
        (f"{NCCL}{SHM}", f"n1:7:9 [0] misc/shmutils.cc:87 NCCL WARN {SHM}\n",
         f"NCCL: {SHM} (misc/shmutils.cc:87)"),
        (f"{NCCL}ncclRemoteError", "n1:7:9 [0] NCCL WARN socket refused\n" * 3,
         "NCCL: ncclRemoteError; NCCL: socket refused"),
        ("Socket Timeout", "", "no connection within 15 s"),
        ("wait timed out", "n1:7 NCCL WARN no route to host",
         "no connection within 15 s; NCCL: no route to host"),
        ("[gloo/transport/tcp/pair.cc:144] connect [127.0.1.1]:4711: Connection refused", "",
         "[gloo/transport/tcp/pair.cc:144] connect [127.0.1.1]:4711: Connection refused"),
    ],
)  # fmt: skip
def test_nccl_s_own_reason_is_kept_whole(tmp_path, error, log, reason):
    (tmp_path / "log").write_text(log)
    assert failure_reason(RuntimeError(error), tmp_path / "log") == reason


def pairs(**odd: PairResult | float | str) -> list[PairResult]:
    """All pairs of NODES at the fast rate, but those named `n1_n3`: another rate, or a problem."""
    results = []
    for nodes in combinations(NODES, 2):
        what = odd.get("_".join(nodes), FAST)
        problem = what if isinstance(what, str) else ""
        rate = what if isinstance(what, float) else None
        results.append(PairResult(nodes=nodes, bytes_per_second=rate, problem=problem))
    return results


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_pair_is_measured_once_and_no_node_twice_at_a_time(count):
    assert pair_rounds(["n1"]) == [[("n1",)]], "a single node is measured alone"
    nodes = [f"n{number}" for number in range(count)]
    rounds = pair_rounds(nodes)
    measured = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, measured)) == sorted(map(sorted, combinations(nodes, 2)))
    for pairs_at_once in rounds:
        busy = [node for pair in pairs_at_once for node in pair]
        assert len(busy) == len(set(busy))


WELL = [found(rank, node) for rank, node in enumerate(NODES)]
LOST, NO_CUDA = "no connection", "found no usable CUDA, expected 8 GPUs on this node"


@pytest.mark.parametrize(
    ("ranks", "results", "expected"),
    [
        (WELL, pairs(), {}),
        (WELL, pairs(n1_n3=SLOW, n2_n3=SLOW, n3_n4=SLOW),
         {"n3": ("slow", "20%")}),
        (WELL, pairs(n1_n3=LOST, n2_n3=LOST, n3_n4=LOST),
         {"n3": ("broken", f"with n2: {LOST}"), "n1": ("link", f"with n3: {LOST}"),
          "n2": ("link", LOST), "n4": ("link", LOST)}),
        (WELL, pairs(n1_n2="wrong sums"),
         {"n1": ("link", "wrong sums"), "n2": ("link", "with n1: wrong sums")}),
        ([found(0, "n1"), found(1, "n2", matmul=25e9), found(2, "n3", disk=1e8), found(3, "n4")],
         pairs(),
         {"n2": ("slow", "rank 1 multiplies matrices at 50%"), "n3": ("slow", "disk at 10%")}),
        # CUDA does not work on a node, a rank is missing, all together do not connect.
        ([*WELL[:3], replace(WELL[3], problem=NO_CUDA, matmul_flops=0.0)], pairs(),
         {"n4": ("broken", NO_CUDA)}),
        (WELL, [*pairs(), PairResult(nodes=tuple(NODES), bytes_per_second=None, problem=LOST)],
         {"all 4": ("broken", LOST)}),
        ([*WELL[:3], replace(WELL[3], missing="no compiler")], pairs(),
         {"n4": ("slow", "no compiler")}),
        # Two nodes cannot be compared, but a lost connection breaks both.
        (WELL[:2], [PairResult(nodes=("n1", "n2"), bytes_per_second=SLOW)], {}),
        (WELL[:2], [PairResult(nodes=("n1", "n2"), bytes_per_second=None, problem=LOST)],
         {"n1": ("broken", LOST), "n2": ("broken", LOST)}),
    ],
)  # fmt: skip
def test_only_the_nodes_at_fault_are_named_with_what_is_wrong(ranks, results, expected):
    reports = {each.node: each for each in rate_nodes(ranks, results, missing=["n9"])}
    assert reports.keys() == {*NODES[: len(ranks)], *expected, "n9"}
    assert reports.pop("n9").verdict == "broken", "it did not respond"
    for node, report in reports.items():
        verdict, problem = expected.get(node, ("ok", ""))
        assert report.verdict == verdict
        assert problem in "; ".join(report.problems)
        assert bool(problem) == bool(report.problems)
