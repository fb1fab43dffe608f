"""`launcher cancel`: stop a run, after a last checkpoint if there is time for one."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from data_pipeline.errors import ConfigError, UserError
from launcher.slurm import client as slurm
from launcher.status.infer_status import State
from launcher.status.run_state import RunState
from launcher.status.slurm_queue import read_states
from pretrain.rundir.launch_events import Canceled
from pretrain.rundir.lock import Lock
from pretrain.rundir.own_names import refuse_links
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path

_WAIT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `launcher cancel`."""
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")


def run(arguments: argparse.Namespace) -> int:
    """0 when nothing of the run is running any more."""
    (state,) = read_states([arguments.run])
    run_dir = RunDir(arguments.run)
    refuse_links(run_dir.path)
    if state.job and any(job.is_live for job in slurm.jobs([state.job])):
        # First the ledger, then Slurm: what the job's ranks write while they end comes after this
        # event.
        run_dir.ledger.append(Canceled(job=state.job, step=state.step))
        slurm.cancel(state.job)
        print(f"job {state.job} is canceled; {_way_back(arguments.run, state)}")
        return 0
    locks = run_dir.locks()
    holder = next((lock for lock in locks if lock.is_held), None)
    if holder is None:
        raise _nothing_to_cancel(arguments.run, state, locks)
    print(f"asking process {holder.pid} to save and stop", flush=True)
    _ask_to_stop(run_dir, holder)
    _wait_for_end(run_dir)
    (state,) = read_states([arguments.run])
    print(f"{state.description}; {_way_back(arguments.run, state)}")
    return 0


def _nothing_to_cancel(path: Path, state: RunState, locks: list[Lock]) -> ConfigError:
    if state.state is State.RUNNING and (
        elsewhere := [lock for lock in locks if lock.is_held is None]
    ):
        lock = elsewhere[0]
        return ConfigError(
            f"{path} is run by process {lock.pid} on {lock.hostname}; cancel it there"
        )
    return ConfigError(f"{path} is not running ({state.description}); there is nothing to cancel")


def _ask_to_stop(run_dir: RunDir, holder: Lock) -> None:
    """Send SIGTERM to the holder of a lock, and to no other process, whatever the files say."""
    try:
        process = os.pidfd_open(holder.pid)  # from here on its id means no other process
    except OSError as error:  # it has ended, or the number is none
        raise UserError(
            f"process {holder.pid}, named in {run_dir.path}, cannot be reached "
            f"({error.strerror}); see 'launcher status {run_dir.path}'"
        ) from None
    try:
        still = [lock.pid for lock in run_dir.locks() if lock.is_held]
        user = os.stat(f"/proc/{holder.pid}").st_uid
        if holder.pid < 2 or holder.pid not in still or user != os.geteuid():
            raise UserError(
                f"process {holder.pid}, named in {run_dir.path}, belongs to user {user}, expected "
                f"one of user {os.geteuid()} that holds the run's lock; cancel the run as its user"
            )
        signal.pidfd_send_signal(process, signal.SIGTERM)
    finally:
        os.close(process)


def _wait_for_end(run_dir: RunDir) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while any(lock.is_held for lock in run_dir.locks()):
        if time.monotonic() > deadline:
            raise UserError(
                f"{run_dir.path} is still running after {_WAIT_SECONDS:.0f} s; see 'launcher logs'"
            )
        time.sleep(0.1)


def _way_back(path: Path, state: RunState) -> str:
    step = f"step {state.checkpoint or 0:,}"
    return f"'launcher resume {path}' continues from {step} or later"
