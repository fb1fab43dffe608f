"""Retries of writes and reads while storage fails. Torch-free.

A disk is full until a user frees space; a file server is away until it is back. The run did
nothing wrong and can wait. Writers note each failure in `WriteFailures`, which decides when to try
again and when to give up. Until then training continues after a failed save, but a rewind waits
until the ledger has recorded it.

A run tries for `checkpoint.storage_patience_seconds`; commands try once.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from foundation.errors import os_error_text, remedy_of
from foundation.progress import duration
from pretrain.errors import StorageError

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between two tries; doubled after each
ANY_REMEDY = "free disk space or make it writable,"
SETTING = "checkpoint.storage_patience_seconds"
WAITS = "the run waits"
HOW_TO_STOP = "a request to stop (Ctrl-C, SIGTERM, scancel) ends the wait"

logger = logging.getLogger(__name__)


class Clock:
    """The monotonic clock. Tests replace it by one that does not wait."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for these seconds."""
        time.sleep(seconds)


CLOCK = Clock()


@dataclass(frozen=True)
class StorageRetry:
    """How many seconds to try again while storage fails.

    During a pause `while_waiting` is called about once a second; what it raises ends the wait.
    `stop_requests` returns how many requests to stop have come; a new one ends the wait, too.
    """

    seconds: float = 0.0
    while_waiting: Callable[[], None] = lambda: None
    stop_requests: Callable[[], int] = lambda: 0
    clock: Clock = CLOCK


class WriteFailures:
    """Consecutive failures of one kind of write, and the pauses between tries."""

    def __init__(self, retry: StorageRetry) -> None:
        self._retry = retry
        self._since: float | None = None
        self._pause = self._next_try = 0.0
        self._problem = self._remedy = ""
        # The number of stop requests when the run began to wait; None while training continues.
        self._stop_requests: int | None = None
        self._is_wait_logged = False

    @property
    def is_due(self) -> bool:
        """Whether a write has failed and it is time to try it again."""
        return self._since is not None and self._retry.clock.now() >= self._next_try

    @property
    def is_over_limit(self) -> bool:
        """Whether writes have failed for longer than the run may wait."""
        # The same sum as in `failed`, which sets the last try: a difference could be rounded down.
        end = math.inf if self._since is None else self._since + self._retry.seconds
        return self._retry.clock.now() >= end

    def failed(self, problem: str, meanwhile: str, remedy: str = ANY_REMEDY) -> None:
        """Note a failure; log the first one, with what happens `meanwhile`."""
        now = self._retry.clock.now()
        self._problem, self._remedy = problem, remedy
        waits = self._stop_requests is not None
        is_news = self._since is None or (waits and not self._is_wait_logged)
        if self._since is None:
            self._since, self._pause = now, FIRST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if is_news and not self.is_over_limit:
            limit = self._since + self._retry.seconds - now
            most = f" for up to {duration(limit)}" if math.isfinite(limit) else ""
            end = f"; {HOW_TO_STOP}" if waits else ""
            meanwhile = WAITS if waits else meanwhile
            logger.warning("%s; %s, and tries again%s%s", problem, meanwhile, most, end)
            self._is_wait_logged = waits
        # The last pause is cut, so that one more try is made when the time is over.
        self._next_try = min(now + self._pause, max(now, self._since + self._retry.seconds))

    def run_waits(self) -> None:
        """Note that the run only waits from now on, so that a request to stop ends it."""
        self._stop_requests = self._retry.stop_requests()

    def ended(self) -> None:
        """Note a success."""
        if self._since is not None:
            away = duration(self._retry.clock.now() - self._since)
            logger.warning("works again after %s: %s", away, self._problem)
        self._since = None
        self._is_wait_logged = False

    def pause(self) -> None:
        """Wait until the next try; StorageError if the run is asked to stop while it waits."""
        while (left := self._next_try - self._retry.clock.now()) > 0:
            self._retry.while_waiting()
            before = self._stop_requests
            if before is not None and self._retry.stop_requests() > before:
                raise StorageError(
                    f"{self._problem}; stopped, as asked, while the run waited for it; what came "
                    "after the latest checkpoint is not saved, rerun the command to resume from it"
                )
            self._retry.clock.sleep(min(left, 1.0))

    def error(self) -> StorageError:
        """Return what to raise once the time is over."""
        waited = f" (waited {SETTING}={self._retry.seconds:g})" if self._retry.seconds else ""
        return StorageError(
            f"{self._problem}{waited}; {self._remedy} and rerun the command to resume from the "
            "latest checkpoint"
        )


def with_retries(retry: StorageRetry, act: Callable[[], T]) -> T:
    """Call `act` until it raises no OSError, and return its result.

    Raises StorageError when the time is over, and the OSError itself if `retry` allows no time.
    """
    failures = WriteFailures(retry)
    failures.run_waits()
    while True:
        try:
            result = act()
        except OSError as error:
            if not retry.seconds:
                raise
            failures.failed(os_error_text(error), WAITS, remedy_of(error))
            if failures.is_over_limit:
                raise failures.error() from error
            failures.pause()
        else:
            failures.ended()
            return result
