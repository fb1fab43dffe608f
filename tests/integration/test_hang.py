"""A rank that stops running: the others do not wait for it forever."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.rundir.ledger import events_of
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.training_events import Stalled
from tests.integration.test_checkpoint_failures import SETTINGS


@pytest.mark.slow
def test_ranks_wait_for_a_stopped_one_and_name_it_but_not_forever(
    tiny_corpus: Path, tmp_path: Path
):
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(f"data: {{path: {tiny_corpus}}}\n")
    run_dir = RunDir(tmp_path / "run")
    command = train_command(experiment, run_dir.path, *SETTINGS)
    command += [
        "optim.steps=100000",
        "checkpoint.interval=100000",
        "engine.watchdog_timeout_seconds=15",
    ]
    with RankGroup(command, 2, tmp_path / "logs") as group:
        deadline = time.monotonic() + 60
        while not run_dir.read_metrics():
            assert time.monotonic() < deadline, group.logs[0].read_text()
            assert group.poll() == [None, None], group.logs[0].read_text()
            time.sleep(0.05)
        os.kill(group.pids[1], signal.SIGSTOP)
        time.sleep(5.5)
        os.kill(group.pids[1], signal.SIGCONT)
        while not (stalls := events_of(run_dir.ledger.read(), Stalled)):
            assert time.monotonic() < deadline, group.logs[0].read_text()
            time.sleep(0.05)
        os.kill(group.pids[1], signal.SIGSTOP)
        statuses = group.wait(timeout=60, grace=1)
    assert [event.rank for event in stalls] == [1]
    (stalled,) = [line for line in run_dir.read_metrics() if "stall" in line]
    assert stalled["stall"] > 5 > stalled["seconds"], "not in the time that goodput counts"
    assert statuses == [-signal.SIGALRM, -signal.SIGKILL]
    log = group.logs[0].read_text()
    assert "Timeout" in log
    assert "in train" in log
