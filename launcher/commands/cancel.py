"""`launcher cancel`: stop a run, after a last checkpoint if there is time for one."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from foundation.errors import ConfigError, UserError, os_error_text, shown
from launcher.run_state import RunState, read_states
from launcher.run_status import State
from launcher.slurm.client import QueuedJob, Slurm
from pretrain.rundir.events import Canceled
from pretrain.rundir.lock import Lock
from pretrain.rundir.ownership import refuse_foreign_run, refuse_links
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path

_WAIT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher cancel`."""
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 when nothing of the run is running any more."""
    (state,) = read_states([arguments.run])
    run_dir = RunDir(arguments.run)
    refuse_links(run_dir.path)
    refuse_foreign_run(run_dir.path)
    slurm = Slurm()
    if state.job and (live := [job for job in slurm.jobs([state.job]) if job.is_live]):
        refuse_other_jobs(live, state.work_dirs)
        try:  # before Slurm: what the job's ranks write while they end comes after this event
            run_dir.ledger.append(Canceled(job=state.job, step=state.step))
        except OSError as error:  # a run that waits for its storage can be canceled
            print(f"warning: not in the ledger: {os_error_text(error)}", file=sys.stderr)
        slurm.cancel(state.job)
        print(f"job {state.job} is canceled; {_way_back(state)}")
        return 0
    locks = run_dir.locks()
    holder = next((lock for lock in locks if lock.is_held), None)
    if holder is None:
        elsewhere = [lock for lock in locks if lock.is_held is None]
        if state.state is State.RUNNING and elsewhere:
            pid, hostname = elsewhere[0].pid, elsewhere[0].hostname
            raise ConfigError(
                f"{run_dir.path} is run by process {pid} on {hostname}; cancel it there"
            )
        raise ConfigError(
            f"{run_dir.path} is not running ({state.description}); there is nothing to cancel"
        )
    print(f"asking process {holder.pid} to save and stop", flush=True)
    _ask_to_stop(run_dir, holder)
    deadline = time.monotonic() + _WAIT_SECONDS
    while any(lock.is_held for lock in run_dir.locks()):
        if time.monotonic() > deadline:
            raise UserError(
                f"{run_dir.path} is still running after {_WAIT_SECONDS:.0f} s; see 'launcher logs'"
            )
        time.sleep(0.1)
    (state,) = read_states([arguments.run])
    print(f"{state.description}; {_way_back(state)}")
    return 0


def refuse_other_jobs(live: Sequence[QueuedJob], work_dirs: Sequence[str]) -> None:
    """Raise ConfigError unless these jobs work where the run's jobs do: Slurm, when its state is
    lost, gives their numbers to others."""
    for job in live:
        if job.work_dir not in work_dirs:
            raise ConfigError(
                f"job {job.address} works in {shown(job.work_dir)}, expected "
                f"{' or '.join(map(shown, work_dirs))}; if it is the run's nevertheless: "
                f"scancel {job.address}"
            )


def _ask_to_stop(run_dir: RunDir, holder: Lock) -> None:
    """Send SIGTERM to the holder of a lock, and to no other process, whatever the files say."""
    try:
        user = os.stat(f"/proc/{holder.pid}").st_uid
    except FileNotFoundError:
        raise UserError(f"process {holder.pid} has ended; see 'launcher status'") from None
    still = [lock.pid for lock in run_dir.locks() if lock.is_held]
    if holder.pid < 2 or holder.pid not in still or user != os.geteuid():
        raise UserError(
            f"process {holder.pid}, named in {run_dir.path}, belongs to user {user}, expected "
            f"one of user {os.geteuid()} that holds the run's lock; cancel the run as its user"
        )
    os.kill(holder.pid, signal.SIGTERM)


def _way_back(state: RunState) -> str:
    return f"'launcher resume {state.path}' continues from step {state.checkpoint or 0:,} or later"
