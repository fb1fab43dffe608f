"""Stalls: single steps that take far longer than usual, and the rank that stood still meanwhile.

A stopped process, a frozen host or storage that hangs costs every rank the same time, because all
of them wait. That time is not productive. Each rank notices by a thread that ticks whether its own
process stood still.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence

TICK_SECONDS = 0.25
LEAST_STANDSTILL_SECONDS = 2.0  # a tick that is later by less may be a busy machine's
LEAST_STALL_SECONDS = 5.0
TIMES_USUAL = 5.0
STEPS_KNOWN, LEAST_STEPS_KNOWN = 100, 3  # by which a step is judged


class StandstillClock:
    """Measures how long this process stood still: stopped, suspended or frozen."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="standstill", daemon=True)
        self._thread.start()

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(TICK_SECONDS):
            now = time.monotonic()
            if now - before > LEAST_STANDSTILL_SECONDS:
                self._seconds += now - before - TICK_SECONDS
            before = now


class StallMeter:
    """Finds stalls among the durations of steps, by those of the steps before."""

    def __init__(self) -> None:
        self._known: deque[float] = deque(maxlen=STEPS_KNOWN)
        self._stalled = 0.0

    def observe(self, seconds: float, is_whole: bool = True) -> None:
        """Take the duration of a step, or of a part that does not count as usual."""
        if len(self._known) >= LEAST_STEPS_KNOWN:
            usual = statistics.median(self._known)
            if seconds - usual > LEAST_STALL_SECONDS and seconds > TIMES_USUAL * usual:
                self._stalled += seconds - usual
        if is_whole:
            self._known.append(seconds)

    def take(self) -> float:
        """The seconds lost since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled


def rank_that_stalled(
    stalled: float, standstill_R: Sequence[float], busy_R: Sequence[float]
) -> int | None:
    """The rank that stood still, or was busy alone, for at least half of the stall.

    None if there is only one rank, or if it was not one rank's doing.
    """
    for seconds_R in (standstill_R, busy_R):
        longest = max(seconds_R)
        rank = seconds_R.index(longest)
        others = [seconds for other, seconds in enumerate(seconds_R) if other != rank]
        if others and longest - max(others) >= stalled / 2:
            return rank
    return None
