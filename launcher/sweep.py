"""`launcher sweep`: the cells of a sweep file, several at once on this machine; what is done is never done again."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import EXIT_USER_ERROR, ConfigError
from launcher.supervisor import StopSignals, newest_step
from pretrain.local_ranks import EXIT_STOPPED, RankGroup, failure_in_words, status_in_words
from pretrain.run_dir import RunDir
from pretrain.scaling.sweep_file import Cell, config_of, read_sweep

POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class CellState:
    """Where a cell stands, read from its run's directory."""

    name: str
    state: str  # waiting, begun, done
    step: int
    steps: int
    loss: float | None  # of the last training step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher sweep`."""
    parser.add_argument("action", choices=("submit", "status"), help="run what is not done yet, or show what is")
    parser.add_argument("sweep", type=Path, help="sweep file, as 'pretrain scale plan' writes it")
    parser.add_argument("--runs-dir", type=Path, help="where the cells' directories are (default runs/SWEEP)")
    parser.add_argument("--local", action="store_true", help="on this machine")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="cells at a time (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each cell (default %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """0 when every cell is done (or for `status`), 2 when one failed, 75 when stopped on request."""
    sweep = read_sweep(arguments.sweep)
    runs = arguments.runs_dir or Path("runs") / sweep.name
    if arguments.action == "status":
        for line in status_lines([state_of(cell, arguments.sweep, runs) for cell in sweep.cells]):
            print(line)
        return 0
    if min(arguments.jobs, arguments.ranks) < 1:
        raise ConfigError(f"--jobs={arguments.jobs} and --ranks={arguments.ranks} must be 1 or more")
    if not arguments.local:
        raise ConfigError("submitting a sweep to a cluster is not possible yet; add --local to run it on this machine")
    states = {cell.name: state_of(cell, arguments.sweep, runs) for cell in sweep.cells}
    waiting = [cell for cell in sweep.cells if states[cell.name].state != "done"]
    print(f"{len(sweep.cells) - len(waiting)} of {len(sweep.cells)} cells are done", flush=True)
    runs.mkdir(parents=True, exist_ok=True)
    with StopSignals() as stop, RunDir(runs).locked("sweep"):
        failed = _run_cells(waiting, arguments, runs, stop)
        if stop.requests:
            print("stopped on request; the same command goes on")
            return EXIT_STOPPED
    if failed:
        print(f"{len(failed)} cells failed: {', '.join(failed)}; the same command tries them again, and only them")
        return EXIT_USER_ERROR
    print(f"all {len(sweep.cells)} cells are done; next: pretrain scale collect {arguments.sweep} --runs-dir {runs}")
    return 0


def state_of(cell: Cell, sweep_path: Path, runs: Path) -> CellState:
    """Done means finished and its last checkpoint there."""
    config = config_of(cell, sweep_path)
    run_dir = RunDir(runs / cell.name)
    if not run_dir.exists():
        return CellState(name=cell.name, state="waiting", step=0, steps=config.optim.steps, loss=None)
    finished = any(event.get("event") == "finish" for event in run_dir.read_ledger())
    step = newest_step(run_dir)
    trained = [line for line in run_dir.read_metrics() if line.get("kind") == "train"]
    losses = [line["loss"] for line in trained if line["loss"] is not None]
    return CellState(
        name=cell.name,
        state="done" if finished and step >= config.optim.steps else "begun",
        step=step,
        steps=config.optim.steps,
        loss=losses[-1] if losses else None,
    )


def status_lines(states: Sequence[CellState]) -> list[str]:
    """A line per cell and one for all."""
    width = max(len(state.name) for state in states)
    lines = [
        f"{state.name:{width}}  {state.state:8}{state.step:>8,} of {state.steps:,} steps"
        + (f"  loss {state.loss:.4f}" if state.loss is not None else "")
        for state in states
    ]
    done = sum(state.state == "done" for state in states)
    return [*lines, f"{done} of {len(states)} cells are done"]


def _run_cells(waiting: list[Cell], arguments: argparse.Namespace, runs: Path, stop: StopSignals) -> list[str]:
    """Run the cells, `jobs` at a time; the names of those that failed."""
    waiting, failed = list(waiting), []
    running: dict[str, RankGroup] = {}
    passed_on = 0
    try:
        while running or (waiting and not stop.requests):
            while waiting and len(running) < arguments.jobs and not stop.requests:
                cell = waiting.pop(0)
                running[cell.name] = _started(cell, arguments, runs)
                print(f"{cell.name}: process {running[cell.name].pids[0]}", flush=True)
            for name, group in list(running.items()):
                if (status := group.poll()[0]) is not None:
                    del running[name]
                    print(f"{name}: {'done' if status == 0 else status_in_words(status)}", flush=True)
                    if status not in (0, EXIT_STOPPED):
                        failed.append(name)
                        print(failure_in_words([status], group.logs, lines=5), flush=True)
            if stop.requests > passed_on:
                for group in running.values():
                    group.terminate() if passed_on == 0 else group.kill()
                passed_on = stop.requests
            time.sleep(POLL_SECONDS)
    finally:
        for group in running.values():
            group.kill()
    return failed


def _started(cell: Cell, arguments: argparse.Namespace, runs: Path) -> RankGroup:
    experiment = arguments.sweep.parent / cell.experiment
    command = [sys.executable, "-m", "launcher", "local", str(experiment), f"--ranks={arguments.ranks}"]
    command += [f"--run-dir={runs / cell.name}", *cell.overrides]
    return RankGroup(command, 1, runs / "logs" / cell.name)
