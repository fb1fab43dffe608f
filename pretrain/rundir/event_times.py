"""The times of a run's events when clocks differ: nodes' clocks jump, and disagree. Pure.

The order of the ledger's lines is what happened; times only say when. Torch-free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from pretrain.rundir.training_events import Event

NOTABLE_SECONDS = 60.0  # by which clocks of a cluster do not differ


def in_order(events: Sequence[Event], now: float) -> tuple[list[Event], int]:
    """The events with times that never fall and are not after `now`, and how many were far off.

    As many events as possible keep theirs. The others get the time of the one before them that
    does, or of the first one: no time between two events is negative, or counted twice.
    """
    times = [min(event.time, now) for event in events]
    trusted = _longest_rising(times)
    latest = times[trusted[0]] if trusted else now
    kept, found, num_off = set(trusted), [], 0
    for index, event in enumerate(events):
        latest = times[index] if index in kept else latest
        num_off += abs(event.time - latest) > NOTABLE_SECONDS
        found.append(event if event.time == latest else replace(event, time=latest))
    return found, num_off


def _longest_rising(times: Sequence[float]) -> list[int]:
    """The indices of the longest subsequence of times that does not fall."""
    ends: list[int] = []  # ends[n]: the last index of such a sequence of n + 1 times
    before: list[int] = []
    for index, time in enumerate(times):
        place = bisect_right(ends, time, key=lambda end: times[end])
        before.append(ends[place - 1] if place else -1)
        ends[place : place + 1] = [index]
    rising = []
    index = ends[-1] if ends else -1
    while index >= 0:
        rising.append(index)
        index = before[index]
    return rising[::-1]
