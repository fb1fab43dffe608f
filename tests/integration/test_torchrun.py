"""Ranks that torchrun starts, for each way to say where they meet, and starts again."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.run_dir import RunDir

pytestmark = pytest.mark.slow
RUN = RunDir(Path("runs/tiny"))


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torchrun") / "tiny.yaml"
    path.write_text(
        f"""name: tiny
model: {{num_layers: 1, d_model: 16, num_heads: 2, memory_length: 8}}
data: {{path: {tiny_corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: 6}}
engine: {{kind: torch}}
checkpoint: {{interval: 1}}
metrics: {{interval: 1, tensorboard: false}}
"""
    )
    return path


def torchrun(experiment: Path, options: str, **variables: str) -> subprocess.Popen[str]:
    """Start a run whose options have PORT where a free port belongs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = options.replace("PORT", str(server.getsockname()[1])).split()
    command = [Path(sys.executable).parent / "torchrun", *words, "-m", "pretrain", "train"]
    return subprocess.Popen(
        [*command, experiment, "--run-dir", RUN.path],
        env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def steps_seen() -> list[int]:
    return [line["step"] for line in RUN.read_metrics() if line["kind"] == "train"]


@pytest.mark.parametrize(
    "options", ["", "--master-port PORT", "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT"]
)
def test_ranks_meet_wherever_torchrun_says(options, experiment):
    process = torchrun(experiment, f"--nproc-per-node 2 {options}")
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert steps_seen() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("options", ["--master-port PORT", "--standalone"])
def test_ranks_that_torchrun_starts_again_meet_again(options, experiment):
    options = f"--nproc-per-node 2 --max-restarts 1 {options}"
    process = torchrun(experiment, options, **{VARIABLE: "slow:0.3@1"})
    while process.poll() is None and (not RUN.metrics.exists() or len(steps_seen()) < 3):
        time.sleep(0.05)
    agent = psutil.Process(process.pid)
    rank = next(each for each in agent.children() if each.environ().get("RANK") == "1")
    rank.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert steps_seen() == [1, 2, 3, 4, 5, 6]
