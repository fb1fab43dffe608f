"""`launcher preflight --local` with real ranks: on one machine nothing can be compared, but all of
it is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys


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
