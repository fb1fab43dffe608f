"""A rank that stops running: the others do not wait forever, and write what they waited for."""

import os
import pickle
import re
import signal
import time

import pytest

from launcher.cli import main
from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.rundir.attempt_files import AttemptFiles
from pretrain.rundir.events import Slowdown
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.jobs import until
from tests.integration.test_checkpoint_failures import SETTINGS


def stalls_in(run_dir: RunDir) -> list[Slowdown]:
    return [each for each in find_events(run_dir.ledger.read(), Slowdown) if each.ratio is None]


@pytest.mark.slow
def test_ranks_wait_for_a_stopped_one_and_name_it_but_not_forever(tiny_corpus, tmp_path, capsys):
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(f"data: {{path: {tiny_corpus}}}\n")
    run_dir = RunDir(tmp_path / "run")
    endless = ("optim.steps=100000", "checkpoint.interval=100000")
    patience = "engine.watchdog_timeout_seconds=15"
    command = train_command(experiment, run_dir.path, *SETTINGS, *endless, patience)
    run_dir.path.mkdir()
    with RankGroup(command, 2, run_dir.logs, attempt=3) as group:

        def ranks_reach(condition) -> None:
            until(lambda: condition() or group.poll() != [None, None], 300)
            assert group.poll() == [None, None], group.logs[0].read_text()

        ranks_reach(run_dir.read_metrics)
        os.kill(group.pids[1], signal.SIGSTOP)
        time.sleep(5.5)
        os.kill(group.pids[1], signal.SIGCONT)
        ranks_reach(lambda: stalls_in(run_dir))
        (stall,) = stalls_in(run_dir)
        os.kill(group.pids[1], signal.SIGSTOP)
        statuses = group.wait(grace=1)
    assert stall.rank == 1
    (stalled,) = [line for line in run_dir.read_metrics() if "stall" in line]
    assert stalled["stall"] > 5 > stalled["seconds"], "not in the time that goodput counts"
    assert statuses == [-signal.SIGALRM, -signal.SIGKILL]
    log = group.logs[0].read_text()
    assert "Timeout" in log
    assert "in train" in log
    # The rank that waited says in which collective; the stopped one cannot say anything.
    (trace,) = run_dir.logs.glob("attempt-3/gloo-*")
    assert AttemptFiles(run_dir.logs, 3).traces() == {"gloo-rank-": [0]}
    records = pickle.loads(trace.read_bytes())["entries"]
    assert records[0]["retired"]
    if waits := [record for record in records if not record["retired"]]:
        frames = waits[-1]["frames"]
        assert any(frame["filename"].endswith("pretrain/train.py") for frame in frames)
    else:  # a message between steps, which the recorder does not list
        assert re.search(r"messages.py\", line \d+, in (?:gather_rows|max_over_ranks)", log)
    assert main(["logs", str(run_dir.path), "--errors"]) == 0
    assert f"gloo-rank- -j {run_dir.logs}/attempt-3\n" in capsys.readouterr().out
