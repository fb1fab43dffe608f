"""`launcher cancel` and `launcher signal`: what a user asks of a run that waits or trains."""

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
from pretrain.rundir.events import ASK, Canceled, Requested
from pretrain.rundir.lock import Lock
from pretrain.rundir.ownership import refuse_foreign_run, refuse_links
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_paths import run_path

_WAIT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher cancel`."""
    parser.add_argument("run", type=run_path, metavar="RUN", help="run, or its name in runs/")


def add_signal_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `launcher signal`."""
    add_arguments(parser)
    words = "save or evaluate after this step and train on, or save and stop"
    parser.add_argument("request", choices=("save", "stop", "evaluate"), help=words)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 once Slurm has been told to cancel the job; without one, once nothing runs here."""
    run_dir, slurm = RunDir(arguments.run), Slurm()
    state, job = _own_state(run_dir, slurm)
    if job:
        try:  # before Slurm cancels the job, so that the ranks' last events follow this one
            run_dir.ledger.append(Canceled(job=job, step=state.step))
        except OSError as error:  # a run whose storage fails can be canceled, too
            print(f"warning: not in the ledger: {os_error_text(error)}", file=sys.stderr)
        slurm.cancel(job)
        print(f"job {job} is canceled; {_way_back(state)}")
        return 0
    holder = _holders(run_dir, state)[0]
    print(f"asking process {holder.pid} to save and stop", flush=True)
    _send(run_dir, holder, signal.SIGTERM)
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


def run_signal(arguments: argparse.Namespace) -> int:
    """Return 0 when the run has been asked; it answers after the step in progress."""
    run_dir, slurm, asks_to_stop = RunDir(arguments.run), Slurm(), arguments.request == "stop"
    state, job = _own_state(run_dir, slurm)
    holders = [] if job else _holders(run_dir, state)
    if state.state is not State.RUNNING and (job or not asks_to_stop):
        raise ConfigError(
            f"{run_dir.path} does not train ({state.description}); wait, or 'launcher cancel'"
        )
    if not asks_to_stop:
        run_dir.ledger.append(Requested(request=arguments.request))
    if job:
        slurm.stop(job) if asks_to_stop else slurm.ask(job, ASK)
    else:  # the supervisor, or rank 0, which takes its lock last
        _send(run_dir, *((holders[0], signal.SIGTERM) if asks_to_stop else (holders[-1], ASK)))
    way_back = f"; {_way_back(state)}" if asks_to_stop else ""
    print(f"asked {run_dir.path} to {arguments.request}{way_back}")
    return 0


def _own_state(run_dir: RunDir, slurm: Slurm) -> tuple[RunState, str]:
    """Return the state of this user's run, and the id of its job if that waits or runs, else ''."""
    (state,) = read_states([run_dir.path])
    refuse_links(run_dir.path)
    refuse_foreign_run(run_dir.path)
    live = [job for job in slurm.jobs([state.job] if state.job else []) if job.is_live]
    refuse_other_jobs(live, state.work_dirs)
    return state, state.job if state.job and live else ""


def _holders(run_dir: RunDir, state: RunState) -> list[Lock]:
    """Return who holds the run's locks on this host, its supervisor first."""
    locks = run_dir.locks()
    if holders := [lock for lock in locks if lock.is_held]:
        return holders
    elsewhere = [lock for lock in locks if lock.is_held is None]
    if state.state is State.RUNNING and elsewhere:
        pid, hostname = elsewhere[0].pid, elsewhere[0].hostname
        raise ConfigError(f"{run_dir.path} is run by process {pid} on {hostname}; ask it there")
    raise ConfigError(f"{run_dir.path} is not running ({state.description}); nothing to ask")


def refuse_other_jobs(live: Sequence[QueuedJob], work_dirs: Sequence[str]) -> None:
    """Raise ConfigError unless these jobs work in the directories of the run's jobs: after Slurm
    has lost its state, other jobs may get the same numbers."""
    for job in live:
        if job.work_dir not in work_dirs:
            raise ConfigError(
                f"job {job.address} works in {shown(job.work_dir)}, expected "
                f"{' or '.join(map(shown, work_dirs))}; if it is the run's nevertheless: "
                f"scancel {job.address}"
            )


def _send(run_dir: RunDir, holder: Lock, number: int) -> None:
    """Send a signal to the holder of a lock, and to no other process, whatever the files say."""
    try:
        user = os.stat(f"/proc/{holder.pid}").st_uid
    except FileNotFoundError:
        raise UserError(f"process {holder.pid} has ended; see 'launcher status'") from None
    still = [lock.pid for lock in run_dir.locks() if lock.is_held]
    if holder.pid < 2 or holder.pid not in still or user != os.geteuid():
        raise UserError(
            f"process {holder.pid}, named in {run_dir.path}, belongs to user {user}, expected "
            f"one of user {os.geteuid()} that holds the run's lock; ask the run as its user"
        )
    os.kill(holder.pid, number)


def _way_back(state: RunState) -> str:
    if not state.job and not RunDir(run_path(state.path)).exists():
        return "it had not begun: the same command starts it"
    return f"'launcher resume {state.path}' continues from step {state.checkpoint or 0:,} or later"
