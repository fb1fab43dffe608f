"""Stragglers: each rank's own time per step, without what it waits for the others.

All ranks end a step together, so its duration says nothing. What differs is how long a rank waits
for its data and computes its forward passes, before the first collective. Under ZeRO-3 ranks
already wait for each other in the forward pass, so only slow reading shows there.

Stalls: single steps that take far longer than usual, and the rank that stood still meanwhile.

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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TICK_SECONDS = 0.25
LEAST_STANDSTILL_SECONDS = 2.0  # a tick that is later by less may be a busy machine's
LEAST_STALL_SECONDS = 5.0
TIMES_USUAL = 5.0
SLOW = 1.5  # times the median of the other ranks
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


INTERVALS_IN_A_ROW = 3  # a rank must be slow for at least this many: one may be a hiccup
LEAST_SECONDS = 1.0  # that it must have cost in them: short intervals vary by more than slow ranks


class ForwardClock:
    """Times a module's forward passes in training mode; on a GPU, with the device's clock."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._started: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._handles = (
            module.register_forward_pre_hook(self._start),
            module.register_forward_hook(self._stop),
        )

    def take(self) -> float:
        """The seconds since the last call; waits for the device."""
        passes, self._passes = self._passes, []
        if self._on_gpu:
            torch.cuda.synchronize()
            return sum(start.elapsed_time(end) for start, end in passes) / 1000.0
        return sum(end - start for start, end in passes)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, module: nn.Module, _inputs: Any) -> None:
        self._started = self._now() if module.training else None

    def _stop(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._started is not None:
            self._passes.append((self._started, self._now()))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class SlowestRank:
    """The slowest rank of an interval. `ratio` compares it with the median of the others."""

    rank: int
    seconds: float
    ratio: float

    @property
    def excess(self) -> float:
        """The seconds that it took longer than the others."""
        return self.seconds - self.seconds / self.ratio


def slowest_of(seconds_R: Sequence[float]) -> SlowestRank | None:
    """The rank that took longest for its own work; None if there is only one rank."""
    if len(seconds_R) < 2:
        return None
    rank = max(range(len(seconds_R)), key=seconds_R.__getitem__)
    others = statistics.median(seconds for other, seconds in enumerate(seconds_R) if other != rank)
    return SlowestRank(rank, seconds_R[rank], seconds_R[rank] / max(others, 1e-9))


class StragglerWatch:
    """Names a rank once: when it took SLOW times as long as others for some intervals in a row.

    At least 3 intervals, and enough of them that it has cost a second.
    """

    def __init__(self) -> None:
        self._rank = -1
        self._count, self._cost, self._is_named = 0, 0.0, False

    def observe(self, slowest: SlowestRank, num_steps: int) -> bool:
        """Whether the rank is to be named at this interval of so many steps."""
        is_slow = slowest.ratio >= SLOW
        if not is_slow or slowest.rank != self._rank:
            self._count, self._cost, self._is_named = 0, 0.0, False
        self._rank = slowest.rank if is_slow else -1
        self._count += is_slow
        self._cost += slowest.excess * num_steps if is_slow else 0.0
        if self._is_named or self._count < INTERVALS_IN_A_ROW or self._cost < LEAST_SECONDS:
            return False
        self._is_named = True
        return True
