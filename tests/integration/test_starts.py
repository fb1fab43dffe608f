"""Starts that stand still, and ends of one rank of several: nobody waits for them in silence."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from launcher.cli import main
from launcher.run_state import read_state
from pretrain.cli import main as evaluate_main
from pretrain.distributed.world import init_world
from pretrain.processes.leaving import leave_group
from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.recovery.faults import VARIABLE as FAULT
from pretrain.rundir import attempt_files
from pretrain.rundir.events import AttemptEnded, AttemptReason, OutOfMemory
from pretrain.rundir.exit_statuses import EXIT_OUT_OF_MEMORY, EXIT_STOPPED
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.watchdog import under_watchdog
from tests.gpu_stubs.devices import SITE, Stub, install
from tests.gpu_stubs.devices import VARIABLE as STUBS
from tests.helpers.forked_ranks import ForkedRanks
from tests.helpers.jobs import until
from tests.integration.test_checkpoint_failures import SETTINGS

DESTROY_WAITS = {STUBS: json.dumps({"*": {"gpus": 0}}), "PYTHONPATH": SITE}


@pytest.fixture
def experiment(tiny_corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"data: {{path: {tiny_corpus}}}\n")
    return path


def end_as(ends: dict[int, int | str]) -> int:
    """End this rank with a status or an error of the text, the group's end waiting for all."""
    install(Stub(gpus=0))
    world = init_world()

    def work() -> int:
        end = ends[world.rank]
        if isinstance(end, str):
            raise RuntimeError(end)
        return end

    return leave_group(work, world.world_size)


@pytest.mark.parametrize(
    ("ends", "statuses"),
    [
        ({0: 0, 1: 0}, [0, 0]),
        ({0: EXIT_STOPPED, 1: 0}, [EXIT_STOPPED, 0]),
        # Rank 0 finishes, and waits for rank 1: the launcher ends it.
        ({0: 0, 1: EXIT_OUT_OF_MEMORY}, [None, EXIT_OUT_OF_MEMORY]),
        ({0: EXIT_STOPPED, 1: 2}, [None, 2]),
        ({0: 0, 1: "CUDA error: uncorrectable ECC error encountered"}, [None, 1]),
    ],
)
def test_only_ranks_that_end_well_wait_for_each_other(tmp_path, ends, statuses):
    ranks = ForkedRanks(2, partial(end_as, ends), tmp_path)
    expected = [rank for rank in ends if statuses[rank] is not None]
    until(lambda: all(ranks.statuses[rank] is not None for rank in expected), 300)
    for process in ranks.processes:
        process.kill()
    assert [ranks.statuses[rank] for rank in expected] == [statuses[rank] for rank in expected]
    log = (tmp_path / "rank-1.log").read_text()
    assert log.count("Traceback") == isinstance(ends[1], str)
    assert str(ends[1]) in log or not isinstance(ends[1], str)


def evaluate_on_rank_1(run: Path) -> int:
    """Evaluate what only rank 1 cannot open; rank 0 is inside a collective."""
    install(Stub(gpus=0))
    if os.environ["RANK"] == "1":
        return evaluate_main(["evaluate", str(run)])
    init_world()
    dist.barrier()
    return 0


def test_a_rank_that_cannot_evaluate_waits_for_no_other(tmp_path):
    ranks = ForkedRanks(2, partial(evaluate_on_rank_1, tmp_path / "none"), tmp_path)
    until(lambda: ranks.statuses[1] is not None, 300)
    ranks.processes[0].kill()
    assert ranks.statuses[1] == 2
    assert "error: " in (tmp_path / "rank-1.log").read_text()


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_is_the_reason_although_groups_wait_at_their_end(
    experiment, tmp_path, monkeypatch
):
    for name, value in {**DESTROY_WAITS, FAULT: "oom:1@3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = RunDir(tmp_path / "run")
    options = ("optim.steps=4", "engine.watchdog_timeout_seconds=600")
    command = ["local", str(experiment), "--ranks=2", f"--run-dir={run_dir.path}"]
    assert main([*command, *SETTINGS, *options]) == 0
    first, last = find_events(run_dir.ledger.read(), AttemptEnded)
    assert (first.reason, first.first_failure) == (AttemptReason.OUT_OF_MEMORY, 1)
    assert last.reason is AttemptReason.FINISHED
    (shortage,) = find_events(run_dir.ledger.read(), OutOfMemory)
    assert first.time - shortage.time < 120, "seconds, and the grace of the other rank"


# Rank 1 stands still before its first import, with a limit of its own.
LATE = """
import os, sys
from pretrain.rundir.watchdog import under_watchdog
rank, limit = os.environ["RANK"], float(sys.argv.pop(1))
stands = [sys.executable, "-S", "-c", "import time; time.sleep(999)"]
train = sys.argv[6:] if rank == "0" else stands
command = under_watchdog(train, 900.0 if rank == "0" else limit)
os.execvp(command[0], command)
"""


def start(experiment: Path, run_dir: RunDir, limit: float) -> RankGroup:
    command = train_command(experiment, run_dir.path, *SETTINGS)
    run_dir.path.mkdir(exist_ok=True)
    return RankGroup([sys.executable, "-c", LATE, str(limit), *command], 2, run_dir.logs)


@pytest.mark.slow
def test_a_rank_that_stands_still_before_its_first_import_is_ended(experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    with start(experiment, run_dir, limit=1.0) as group:
        statuses = group.wait(grace=0.5)
    assert statuses == [-signal.SIGKILL, -signal.SIGALRM]
    assert group.first_failure == 1
    assert "Timeout (0:00:01)!" in group.logs[1].read_text()


@pytest.mark.slow
def test_status_names_the_rank_that_has_not_come(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(attempt_files, "LATE_SECONDS", 0.0)
    run_dir = RunDir(tmp_path / "run")
    with run_dir.locked("launcher"), start(experiment, run_dir, limit=900.0):
        until(lambda: "rank 0, rank 1 have not come" in read_state(run_dir.path).reason, 300)
        until(lambda: ", rank 1 has not come" in read_state(run_dir.path).reason, 300)
        state = read_state(run_dir.path)
    assert (state.state, state.reason.partition(" for ")[0]) == ("running", "starting")


@pytest.mark.slow
def test_a_group_that_is_not_made_in_time_ends_with_stacks(experiment, tmp_path, monkeypatch):
    """Rank 1 stands between the meeting and the group, where collectives wait for days."""
    stubs = {"*": {"gpus": 0, "stands_before_init": 999.0, "rank": 1}}
    monkeypatch.setenv(STUBS, json.dumps(stubs))
    monkeypatch.setenv("PYTHONPATH", SITE)
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir(exist_ok=True)
    # Long enough for imports on a busy machine; what is tried is the limit after them.
    seconds = 20.0 + 4.0 * os.getloadavg()[0]
    plain = train_command(experiment, run_dir.path, *SETTINGS)[5:]
    started = time.monotonic()
    with RankGroup(under_watchdog(plain, seconds), 2, run_dir.logs) as group:
        statuses = group.wait(timeout=1500, grace=20)
    assert set(statuses) <= {-signal.SIGALRM, 1}, statuses
    assert -signal.SIGALRM in statuses
    assert time.monotonic() - started < 3 * seconds + 60
    log = group.logs[1].read_text()
    assert "Timeout (" in log
    assert "in init_process_group" in log
