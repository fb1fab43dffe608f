"""The signals that ask a supervisor to stop, and the lock that it holds."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from types import FrameType

from foundation.interruption import ONE_PRESS_SECONDS
from pretrain.checkpoint.storage_retry import CLOCK, Clock, StorageRetry

HOLDER = "launcher"  # holds the lock RUN/launcher.lock


class StopSignals:
    """Counts the signals that ask to stop, instead of dying of them.

    The supervisor has to outlive its ranks, which save a checkpoint first, and to record how they
    ended. So: SIGINT and SIGTERM ask the ranks to save and stop; a second SIGINT (Ctrl-C) kills
    them. A second SIGTERM does not: Slurm sends several while a job ends. SIGUSR1, which `sbatch
    --signal` sends ahead of the time limit, asks too. So does SIGHUP, from a terminal that is
    closed, unless nohup ignores it. SIGUSR2 goes to the ranks alone (see srun.py).
    `received` has all signals in order.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._interrupted = -math.inf  # when the last SIGINT came
        self.received: list[int] = []
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._count)
        # In a batch job they were blocked until now (launcher/slurm/batch_process.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def retry(
        self, seconds: float, meanwhile: Callable[[], None] = lambda: None, clock: Clock = CLOCK
    ) -> StorageRetry:
        """Return how a supervisor waits for its run directory. It calls `meanwhile` about once a
        second. A request to stop raises StopWhileWaiting: unlike a rank, a supervisor has no
        checkpoint to save."""

        def poll() -> None:
            meanwhile()
            if self.requests:
                raise StopWhileWaiting

        return StorageRetry(seconds, while_waiting=poll, clock=clock)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            before, self._interrupted = self._interrupted, time.monotonic()
            if self._interrupted - before < ONE_PRESS_SECONDS:
                return
        self.received.append(number)
        self.requests += 1 if number == signal.SIGINT or not self.requests else 0


class StopWhileWaiting(Exception):
    """The supervisor was asked to stop while it waited, and leaves what it waited for undone."""
