"""A stale attempt: its ranks may survive on a node that was cut off, but they write nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pretrain.checkpoint.directory import steps_on_disk
from pretrain.processes.local_ranks import train_command
from pretrain.rundir.lock import VARIABLE, Fence
from pretrain.rundir.run_dir import RunDir

SETTINGS = """model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 16}}
data: {{path: {corpus}, lanes: 4, segment_length: 8}}
optim: {{steps: 10}}
engine: {{kind: torch}}
checkpoint: {{interval: 5}}
evaluation: {{interval: 0, max_tokens: 200}}
metrics: {{interval: 1, tensorboard: false}}
"""


def test_a_stale_attempt_writes_neither_metrics_nor_checkpoints(tiny_corpus: Path, tmp_path: Path):
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(SETTINGS.format(corpus=tiny_corpus))
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    Fence(run_dir.path, "newer").claim()
    command = train_command(experiment, run_dir.path)
    environment = {**os.environ, VARIABLE: "older"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert "attempt older exits: attempt newer has claimed" in result.stderr
    assert run_dir.read_metrics() == []
    assert steps_on_disk(run_dir.checkpoints) == []
