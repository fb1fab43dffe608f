"""The signals that ask a program of the launcher to stop what it has started."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from foundation.retry import Patience
from pretrain.rundir.lock import StorageNote


class StopSignals:
    """Counts the signals that ask to stop, instead of dying of them.

    The supervisor has to outlive its ranks, which save a checkpoint first, and to record how they
    ended. So: SIGINT and SIGTERM ask the ranks to save and stop; a second SIGINT (Ctrl-C) kills
    them. A second SIGTERM does not: Slurm sends several while a job ends. SIGUSR1, which `sbatch
    --signal` sends ahead of the time limit, asks too. SIGUSR2 goes to the ranks alone (see
    srun.py). `received` has all signals in order.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.received: list[int] = []
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._count)
        # In a batch job they were blocked until now (launcher/slurm/batch_process.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self.requests += 1 if number == signal.SIGINT or not self.requests else 0


HOLDER = "launcher"  # of the lock RUN/launcher.lock


class StopWhileWaiting(Exception):
    """The supervisor was asked to stop, and storage does not work: what it was to write is not
    written. The message says why."""


class StorageWaits:
    """The waits of a supervisor for its run directory. Unlike a rank, which has a checkpoint to
    save, it also gives up what it wants to write after a request to stop has come."""

    def __init__(self, run_dir: Path, stop: StopSignals) -> None:
        self.meanwhile: Callable[[], None] = lambda: None  # called about once a second
        self._stop = stop
        self._note = StorageNote(run_dir, HOLDER)
        self._problem = ""

    def patience(self, seconds: float) -> Patience:
        """A patience of so many seconds, whose waits end with a StopWhileWaiting."""
        return Patience(seconds, while_waiting=self._poll, note=self._failed)

    def _poll(self) -> None:
        self.meanwhile()
        if self._stop.requests:
            self._note.write_stop(signal.Signals(self._stop.received[-1]).name)
            raise StopWhileWaiting(self._problem)

    def _failed(self, problem: str, waits: bool) -> None:
        self._problem = problem
        self._note.write(problem, waits)
