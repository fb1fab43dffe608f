"""Ranks that are slower than the others, and stalls: steps that take far longer than usual.

All ranks end a step together, so its duration says nothing of a **straggler**. What differs is how
long a rank waits for its data and computes its forward passes, before the first collective. Under
ZeRO-3 ranks already wait for each other in the forward pass, so only slow reading shows there.

A **stall** is a step that takes far longer than usual: a stopped process, a frozen host or storage
that hangs costs every rank the same time, because all of them wait. A thread of each rank ticks, so
that the rank notices if its own process stalls.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pretrain.distributed.messages import gather_rows
from pretrain.distributed.world import World
from pretrain.rundir.events import Slowdown

TICK_SECONDS = 0.25
LEAST_STALL_SECONDS = 5.0  # on a busy machine a tick may be late by less
TIMES_USUAL = 5.0  # a step that stalled takes more than this times the usual duration
STEPS_KNOWN, LEAST_STEPS_KNOWN = 100, 3  # the most and fewest previous steps that say what is usual
SLOW = 1.5  # times the median of the other ranks
INTERVALS_IN_A_ROW = 3  # a straggler is slow for at least this many: one may be a hiccup
LEAST_SECONDS = 1.0  # that a straggler has cost in them: short intervals vary by chance


class SlownessMeter:
    """Times this rank's forward passes in training mode, and finds stalls: steps far longer than
    the previous ones, and times when no thread ran. On a GPU passes are timed with its clock."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self._world = world
        self._stalled = 0.0
        self._known: deque[float] = deque(maxlen=STEPS_KNOWN)
        self._started: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._handles = (
            module.register_forward_pre_hook(self._start),
            module.register_forward_hook(self._stop),
        )
        self._frozen, self._ticked, self._lock = 0.0, time.monotonic(), threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="stalls", daemon=True)
        self._thread.start()

    def end_step(self, seconds: float, is_whole: bool = True) -> None:
        """Take the duration of a step, or of a part of one, which does not change what is usual."""
        if len(self._known) >= LEAST_STEPS_KNOWN:
            usual = statistics.median(self._known)
            if seconds - usual > LEAST_STALL_SECONDS and seconds > TIMES_USUAL * usual:
                self._stalled += seconds - usual
        if is_whole:
            self._known.append(seconds)

    def take_stalled(self) -> float:
        """Return the seconds lost in stalls since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def take(self, waited: float) -> list[float]:
        """Return a vector of all ranks: this rank's busy seconds since the last call, else zeros.

        `waited`: seconds that it waited for data. Waits for the device.
        """
        passes, self._passes = self._passes, []
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
            computed = sum(start.elapsed_time(end) for start, end in passes) / 1000.0
        else:
            computed = sum(end - start for start, end in passes)
        busy_R = [0.0] * self._world.world_size
        busy_R[self._world.rank] = waited + computed
        return busy_R

    def take_frozen(self) -> list[float]:
        """Return for how many seconds each rank was frozen since the last call. A collective."""
        self._look()  # the thread may not have run since
        with self._lock:
            frozen, self._frozen = self._frozen, 0.0
        return gather_rows(torch.tensor(frozen, dtype=torch.float64)).tolist()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._closing.set()
        self._thread.join()

    def _start(self, module: nn.Module, _inputs: Any) -> None:
        self._started = self._now() if module.training else None

    def _stop(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._started is not None:
            self._passes.append((self._started, self._now()))

    def _now(self) -> Any:
        if self._world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _tick(self) -> None:
        while not self._closing.wait(TICK_SECONDS):
            self._look()

    def _look(self) -> None:
        with self._lock:
            before, self._ticked = self._ticked, time.monotonic()
            if self._ticked - before > LEAST_STALL_SECONDS:
                self._frozen += self._ticked - before - TICK_SECONDS


def rank_that_stalled(
    stalled: float, frozen_R: Sequence[float], busy_R: Sequence[float]
) -> int | None:
    """Return the rank that was frozen, or else busy, for much longer than any other.

    The difference is at least half of the stall. None if there is one rank, or no such rank.
    """
    for seconds_R in (frozen_R, busy_R):
        longest = max(seconds_R)
        rank = seconds_R.index(longest)
        others = [seconds for other, seconds in enumerate(seconds_R) if other != rank]
        if others and longest - max(others) >= stalled / 2:
            return rank
    return None


def slowest_rank(step: int, seconds_R: Sequence[float]) -> Slowdown | None:
    """Return the rank that took longest, compared with the others' median; None if alone."""
    if len(seconds_R) < 2:
        return None
    rank = max(range(len(seconds_R)), key=seconds_R.__getitem__)
    others = statistics.median(seconds for other, seconds in enumerate(seconds_R) if other != rank)
    ratio = seconds_R[rank] / max(others, 1e-9)
    return Slowdown(step=step, rank=rank, seconds=seconds_R[rank], ratio=ratio)


class StragglerWatch:
    """Names a rank once: when it took SLOW times as long as others for some intervals in a row.

    They are at least 3, and enough that the rank has cost a second.
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self._count, self._cost, self._is_named = 0, 0.0, False

    def observe(self, slowest: Slowdown, num_steps: int) -> bool:
        """Return whether the rank is to be named at this interval of `num_steps`."""
        ratio = slowest.ratio or 1.0
        is_slow = ratio >= SLOW
        if not is_slow or slowest.rank != self._rank:
            self._count, self._cost, self._is_named = 0, 0.0, False
        self._rank = slowest.rank if is_slow else None
        self._count += is_slow
        self._cost += (slowest.seconds - slowest.seconds / ratio) * num_steps if is_slow else 0.0
        if self._is_named or self._count < INTERVALS_IN_A_ROW or self._cost < LEAST_SECONDS:
            return False
        self._is_named = True
        return True
