from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from pretrain.rundir.heartbeat import HeartbeatRecord, NodeHeartbeats
from pretrain.rundir.run_dir import AttemptFiles, RunDir

TASK = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize("has_heartbeat", [True, False])
def test_where_a_killed_rank_stood_is_published_with_its_status(tmp_path, has_heartbeat):
    run_dir = RunDir(tmp_path)
    node = NodeHeartbeats(run_dir.heartbeats, first_rank=2)
    run_dir.heartbeats.mkdir()
    if has_heartbeat:
        record = HeartbeatRecord(
            rank=3, time=1.0, written=2.0, step=17, phase="train",
            hostname=socket.gethostname(), pid=1,
        )  # fmt: skip
        node.publish()  # a moment ago, without this rank
        node.write(record)
    files = AttemptFiles(run_dir.logs, 4)
    files.create()
    kills_itself = ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    task = [sys.executable, "-m", "launcher.slurm.task", str(files.rank_log("{rank}"))]
    ended = subprocess.run([*task, *kills_itself], env={**os.environ, **TASK, **STEP})
    assert ended.returncode == 1
    assert files.rank_log(3).with_suffix(".status").read_text() == "-9"
    if has_heartbeat:
        assert json.loads(node.path.read_text())["step"] == 17
        node.remove(3)
    assert not node.path.exists()
