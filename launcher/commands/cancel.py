"""`launcher cancel`: end a run for good, after a last checkpoint where there is time for one."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from data_pipeline.errors import ConfigError, UserError
from launcher.slurm import client as slurm
from launcher.status.liveness import Lock, read_lock
from launcher.status.queue_state import read_states
from launcher.status.run_state import LOCKS, RunState
from pretrain.rundir.run_dir import RunDir

_WAIT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher cancel`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")


def run(arguments: argparse.Namespace) -> int:
    """0 when nothing of the run goes on any more."""
    (state,) = read_states([arguments.run])
    run_dir = RunDir(arguments.run)
    if state.job and any(job.is_live for job in slurm.jobs([state.job])):
        # Before Slurm is told, so that the job's own supervisor finds it when it asks why it has to stop.
        run_dir.append_ledger({"event": "cancelled", "job": state.job, "step": state.step})
        slurm.cancel(state.job)
        print(f"job {state.job} is cancelled; {_way_back(arguments.run, state)}")
        return 0
    locks = [lock for name in LOCKS if (lock := read_lock(run_dir.path / name))]
    holder = next((lock for lock in locks if lock.is_held), None)
    if holder is None:
        raise _nothing_to_cancel(arguments.run, state, locks)
    print(f"asking process {holder.pid} to save and stop", flush=True)
    os.kill(holder.pid, signal.SIGTERM)
    _wait_for_end(run_dir)
    (state,) = read_states([arguments.run])
    print(f"{state.describe}; {_way_back(arguments.run, state)}")
    return 0


def _nothing_to_cancel(path: Path, state: RunState, locks: list[Lock]) -> ConfigError:
    if state.state == "running" and (elsewhere := [lock for lock in locks if lock.is_held is None]):
        lock = elsewhere[0]
        return ConfigError(f"{path} is run by process {lock.pid} on {lock.host}; cancel it there")
    return ConfigError(f"{path} is not running ({state.describe}); there is nothing to cancel")


def _wait_for_end(run_dir: RunDir) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while any((lock := read_lock(run_dir.path / name)) and lock.is_held for name in LOCKS):
        if time.monotonic() > deadline:
            raise UserError(
                f"{run_dir.path} still runs after {_WAIT_SECONDS:.0f} s; see 'launcher logs'"
            )
        time.sleep(0.1)


def _way_back(path: Path, state: RunState) -> str:
    step = f"step {state.checkpoint:,}" if state.checkpoint else "the beginning"
    return f"'launcher resume {path}' goes on from {step} or later"
