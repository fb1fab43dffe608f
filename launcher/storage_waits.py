"""How a supervisor waits for storage: it can be stopped meanwhile, and its lock says for what.

A run directory that cannot be written takes no ledger entry either. So the reason is noted in the
supervisor's lock, whose block is on disk already (`pretrain/rundir/lock.py`), for
`launcher status`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from data_pipeline.patience import Patience
from launcher.stop_signals import StopSignals
from pretrain.rundir.lock import StorageNote

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
