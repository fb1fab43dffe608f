"""`launcher preflight --local` with real ranks: on one machine nothing can be compared, but all of
it is measured.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.gpu_stubs.devices import SITE, VARIABLE

FAILS = "NCCL error in: x.cpp, NCCL version 2.30.7\nncclSystemError\nLast error:\nno memlock"


def test_this_machine_is_measured_and_nothing_is_left_behind(tmp_path):
    command = [sys.executable, "-m", "launcher", "preflight", "--local", "--ranks=2", "--json"]
    command.append(f"--directory={tmp_path}")
    result = subprocess.run(command, capture_output=True, text=True)
    (node,) = json.loads(result.stdout)["nodes"]
    assert result.returncode == (0 if node["verdict"] == "ok" else 1)
    assert node["ranks"] == 2
    assert node["matmul_flops"] > 1e8
    assert node["disk_bytes"] > 1e5
    assert node["link_best"] > 1e5
    problems = [each for each in node["problems"] if "no connection" in each or "sums" in each]
    assert not problems
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stub", "verdict", "problem"),
    [
        ({"gpus": 2}, "ok", ""),
        ({"gpus": 1, "cuda_error": "Error 802: system not yet initialized"}, "broken", "Error 802"),
        ({"gpus": 2, "nccl_error": FAILS, "nccl_warning": "no memlock"}, "broken", "no memlock"),
    ],
)
def test_gpus_are_tried_as_a_run_uses_them(tmp_path, stub, verdict, problem):
    """Groups of the stub wait for all ranks at their end, which no rank of a preflight does."""
    command = [sys.executable, "-m", "launcher", "preflight", "--local", "--ranks=2", "--json"]
    stubs = {VARIABLE: json.dumps({"*": stub}), "PYTHONPATH": SITE, "PRETRAIN_GPUS": "2"}
    result = subprocess.run(
        [*command, f"--directory={tmp_path}"],
        capture_output=True,
        text=True,
        env={**os.environ, **stubs, "OMP_NUM_THREADS": "1"},
    )
    (node,) = json.loads(result.stdout)["nodes"]
    problems = [each for each in node["problems"] if "compiler" not in each and "head" not in each]
    assert problem in "; ".join(problems)
    assert (node["verdict"] == "broken") == (verdict == "broken"), node
    assert node["device"] == ("" if node["matmul_flops"] is None else "NVIDIA H100 (stub)")
