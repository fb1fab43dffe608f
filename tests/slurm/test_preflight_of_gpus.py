"""`launcher preflight` on hosts whose stubbed GPUs fail at once, in several ways."""

import json
import sys

from tests.gpu_stubs.devices import SITE, VARIABLE

MEMLOCK = "Call to ibv_reg_mr failed with error Cannot allocate memory"
NCCL = f"NCCL error in: x.cpp, NCCL version 2.30.7\nncclSystemError\nLast error:\n{MEMLOCK}"
OTHERS = {"gpus": 2, "nccl_error": NCCL}
ALONE = {
    "n1": {"gpus": 0, "cuda_error": "Error 802: system not yet initialized"},
    "n2": {"gpus": 1},
}
PROBLEMS = {"n1": "no usable CUDA", "n2": "found 1 GPUs, expected 2"}


def test_each_host_is_named_with_its_own_reason(lab, tmp_path):
    out = lab.path / f"preflight-{tmp_path.name}"
    cluster = tmp_path / "cluster.yaml"
    # Two GPUs a host, of which Slurm knows nothing.
    environment = {
        VARIABLE: json.dumps({**ALONE, "*": OTHERS}),
        "PYTHONPATH": SITE,
        "PRETRAIN_GPUS": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "1",
    }
    settings = {"ranks_per_node": 2, "time_limit": "1:00:00", "environment": environment}
    settings["setup"] = ["export GLOO_SOCKET_IFNAME=eth0", "ulimit -l 64"]
    cluster.write_text(json.dumps(settings))  # JSON is YAML
    command = [sys.executable, "-m", "launcher", "preflight", f"--cluster={cluster}", "--nodes=4"]
    result = lab.run(*command, f"--directory={out}", "--json", timeout=500)
    assert result.returncode == 1, result.stderr
    nodes = {node["node"]: node for node in json.loads(result.stdout)["nodes"]}
    assert [node["verdict"] for node in nodes.values()] == ["broken"] * 4, nodes
    for name, expected in {**PROBLEMS, "n3": MEMLOCK, "n4": MEMLOCK}.items():
        assert expected in "; ".join(nodes[name]["problems"]), nodes
    limits = {nodes[name]["memlock"] for name in ("n3", "n4")}
    assert limits == {64 * 1024}
    assert all(nodes[name]["shared_memory"] for name in ("n3", "n4"))
