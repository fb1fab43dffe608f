"""The first launches on GPUs that docs/launcher.md lists: what is found and named, row by row."""

import re
from pathlib import Path

import pytest
import torch
import torch.utils.cpp_extension

from foundation.errors import NodeError
from launcher.commands.preflight import PairResult, rate_nodes
from launcher.slurm import client
from launcher.slurm.srun import SlurmRanks
from pretrain.distributed import world
from pretrain.distributed.rank_device import use_device
from pretrain.distributed.world import world_from_environment
from pretrain.engines.deepspeed_engine import _import_deepspeed
from pretrain.processes.node_check import failure_reason, unmeasured
from pretrain.processes.node_findings import RankMeasurement
from pretrain.rundir.exit_statuses import NEVER_STARTED
from tests.gpu_stubs.devices import Stub, cuda_functions

ROOT = Path(__file__).parents[4]
RANK = {"PRETRAIN_GPUS": "8", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
NCCL = "NCCL error in: NCCLUtils.cpp:94, NCCL version 2.30.7\nncclSystemError: a call failed.\n"
NODES = ("n1", "n2", "n3", "n4")
# What preflight finds: the GPUs of a node, NCCL's or gloo's error with NCCL's log, or all nodes.
FOUND: dict[int, Stub | tuple[str, str]] = {
    1: Stub(cuda_error="The NVIDIA driver on your system is too old (found version 12020)"),
    2: Stub(cuda_error="Error 802: system not yet initialized"),
    3: (f"{NCCL}Last error:\nCuda failure 1 'invalid argument'",
        "n1:1:1 [0] transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'"),
    4: ("[gloo/transport/tcp/pair.cc:144] connect [127.0.1.1]:4711: Connection refused", ""),
    5: ("Socket Timeout", "n1:1:1 [0] misc/socket.cc:484 NCCL WARN no route to host"),
    7: (f"{NCCL}Last error:\nCall to ibv_reg_mr failed with error Cannot allocate memory", ""),
    8: ("wait timeout after 15000ms", ""),
    9: (f"{NCCL}Last error:\nCall to ibv_modify_qp failed with error No data available", ""),
    10: (f"{NCCL}Last error:\nError while creating shared memory segment /dev/shm/nccl-4gB2", ""),
    12: Stub(gpus=4),
    13: Stub(gpus=7),
    14: Stub(gpus=0),
    23: (f"{NCCL}Last error:\nCuda failure 2 'out of memory'", ""),
}  # fmt: skip
# The tests of what is handled or named elsewhere.
_THIS = "test_first_launches.py::"
ELSEWHERE = {
    6: "test_rounds.py::test_rounds_grow_with_the_logarithm",
    11: "test_rank_device.py::test_deepspeed_takes_the_only_gpu_that_a_bound_task_sees",
    15: f"{_THIS}test_a_surrounding_job_does_not_change_what_is_asked_of_slurm",
    16: f"{_THIS}test_srun_s_own_error_is_shown_where_no_rank_started",
    17: f"{_THIS}test_deepspeed_compiles_nothing_when_a_run_starts",
    18: "test_processes.py::test_a_rank_gets_what_nobody_has_set",
    20: f"{_THIS}test_a_rank_makes_its_gpu_current_before_anything_uses_one_and_names_it_to_nccl",
    22: f"{_THIS}test_a_rank_makes_its_gpu_current_before_anything_uses_one_and_names_it_to_nccl",
    24: "test_starts.py::test_only_ranks_that_end_well_wait_for_each_other",
    25: "test_starts.py::test_a_group_that_is_not_made_in_time_ends_with_stacks",
}
SILENT = {19, 21}  # waited for like any long step; a torch that the project does not take


def shown(row: int) -> dict[int, str]:
    """What the page says is seen in each row."""
    page = (ROOT / "docs" / "launcher.md").read_text().partition("## First launches")[2]
    rows = re.findall(r"^\| ([0-9, ]+) \| ([^|]*) \|", page, re.MULTILINE)
    return {int(number): text for numbers, text in rows for number in numbers.split(",")}


@pytest.mark.parametrize("row", FOUND)
def test_preflight_finds_and_names_it(row, monkeypatch, tmp_path):
    case = FOUND[row]
    if isinstance(case, Stub):
        for name, value in cuda_functions(case).items():
            monkeypatch.setattr(torch.cuda, name, value)
        # A driver's error shows when the device is used: NVML counts GPUs without it.
        if case.cuda_error:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        with pytest.raises(NodeError) as raised:
            use_device(world_from_environment(RANK).device)
        found, pairs = [unmeasured(3, str(raised.value))], []
    else:
        (tmp_path / "log").write_text(case[1])
        problem = failure_reason(RuntimeError(case[0]), tmp_path / "log")
        nodes = NODES if row == 8 else NODES[:2]
        found = [
            RankMeasurement(rank=rank, node=node, device="", matmul_flops=1.0, disk_bytes=None)
            for rank, node in enumerate(nodes)
        ]
        pairs = [PairResult(nodes=nodes, bytes_per_second=None, problem=problem)]
    broken = [each for each in rate_nodes(found, pairs, []) if each.verdict == "broken"]
    text = f"{[each.node for each in broken]} {[each.problems for each in broken]}"
    page = shown(row)[row]
    assert page.startswith("P ")
    for phrase in re.findall(r"`([^`]+)`", page):
        for part in phrase.replace("all N", "all 4").replace("ibv_...:", "").split("..."):
            assert part.strip(" :)") in text, (row, part, text)


def test_every_row_is_found_handled_or_known_to_be_silent():
    assert FOUND.keys() | ELSEWHERE.keys() | SILENT == set(range(1, 26)) == shown(0).keys()
    assert len(FOUND) >= 12
    assert len(SILENT) <= 3
    for row, where in ELSEWHERE.items():
        name, _, function = where.partition("::")
        (path,) = ROOT.glob(f"tests/*/**/{name}")
        assert f"def {function}(" in path.read_text(), row


def test_a_surrounding_job_does_not_change_what_is_asked_of_slurm(monkeypatch):
    for name in ("SLURM_MEM_PER_NODE", "SBATCH_EXCLUSIVE", "SQUEUE_FORMAT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    result = client.run_command(["env"], 60.0)
    found = [line for line in result.stdout.splitlines() if line.startswith(("SLURM", "S", "SQ"))]
    names = {line.partition("=")[0] for line in found}
    assert "SLURM_CONF" in names
    assert names.isdisjoint({"SLURM_MEM_PER_NODE", "SBATCH_EXCLUSIVE", "SQUEUE_FORMAT"})


def test_deepspeed_compiles_nothing_when_a_run_starts(monkeypatch, world):
    monkeypatch.setattr(torch.utils.cpp_extension, "load", None)
    deepspeed = _import_deepspeed(torch.device("cpu"))
    assert deepspeed.ops.__compatible_ops__ == {"deepspeed_shm_comm": False}


def test_a_rank_makes_its_gpu_current_before_anything_uses_one_and_names_it_to_nccl(monkeypatch):
    used: list[object] = []
    for name, value in {**cuda_functions(Stub()), "set_device": used.append}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("init", "synchronize"):  # what makes a context, on GPU 0 if none is chosen
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: used.append(name))
    monkeypatch.setattr(world, "rendezvous_store", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda _, **options: used.append(("nccl", options["device_id"])),
    )
    for name, value in {**RANK, "MASTER_ADDR": "n1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "_FORMER_VARIABLES", {})
    world.init_world()
    own = torch.device("cuda", 3)
    assert used == [own, ("nccl", own)]


def test_srun_s_own_error_is_shown_where_no_rank_started(tmp_path):
    ranks = SlurmRanks.__new__(SlurmRanks)  # of a step that srun could not start
    ranks._log = tmp_path / "srun.log"
    ranks._log.write_text(
        "srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x0F.\n"
        "srun: error: Task launch for StepId=7.0 failed on node n1: Unable to satisfy cpu bind\n"
    )
    text = ranks.describe_failure([NEVER_STARTED] * 2)
    assert "no rank started" in text
    assert "CPU binding outside of job step allocation" in text
