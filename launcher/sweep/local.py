"""A sweep's cells on this machine, several at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.supervisor import StopSignals
from launcher.sweep.cells import CellRun
from pretrain.processes.local_ranks import RankGroup, describe_failure
from pretrain.rundir.exit_status import EXIT_STOPPED, describe_exit

_POLL_SECONDS = 0.2


def run_cells(
    cells: Sequence[CellRun],
    sweep_path: Path,
    runs: Path,
    at_a_time: int,
    ranks: int,
    stop: StopSignals,
) -> list[str]:
    """Run the cells; the names of those that failed. A request to stop lets those that run save and end."""
    waiting, failed = list(cells), []
    running: dict[str, RankGroup] = {}
    passed_on = 0
    try:
        while running or (waiting and not stop.requests):
            while waiting and len(running) < at_a_time and not stop.requests:
                cell = waiting.pop(0)
                name = cell.cell.name
                running[name] = _started(cell, sweep_path, runs, ranks)
                print(f"{name}: process {running[name].pids[0]}", flush=True)
            for name, group in list(running.items()):
                if (status := group.poll()[0]) is not None:
                    del running[name]
                    print(f"{name}: {'done' if status == 0 else describe_exit(status)}", flush=True)
                    if status not in (0, EXIT_STOPPED):
                        failed.append(name)
                        print(describe_failure([status], group.logs, lines=5), flush=True)
            if stop.requests > passed_on:
                for group in running.values():
                    group.terminate() if passed_on == 0 else group.kill()
                passed_on = stop.requests
            time.sleep(_POLL_SECONDS)
    finally:
        for group in running.values():
            group.kill()
    return failed


def _started(cell: CellRun, sweep_path: Path, runs: Path, ranks: int) -> RankGroup:
    experiment = sweep_path.parent / cell.cell.experiment
    command = [sys.executable, "-m", "launcher", "local", str(experiment), f"--ranks={ranks}"]
    command += [f"--run-dir={cell.path}", *cell.cell.overrides]
    return RankGroup(command, 1, runs / "logs" / cell.cell.name)
