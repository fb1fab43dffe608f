"""What each name of a speed means. Whatever shows a training speed takes its name from here.

tokens/s         of an interval of metrics: tokens that its steps read, over the seconds they took;
                 `tokens_per_second` in the interval's last line, tok/s in the log
recent tokens/s  the median of the latest five of those: how fast the run is now, from which the
                 time left follows
run tokens/s     tokens of all steps that count, over the seconds these took

scored tokens/s  of an evaluation: tokens of the split that it scored, over its seconds

Tokens are those of all ranks. Seconds of the first three are those of training, with waiting for
data and without evaluation, waiting for saves, stalls and restarts, which goodput has. Torch-free.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

SPEED, RECENT_SPEED, RUN_SPEED = "tokens/s", "recent tokens/s", "run tokens/s"
SCORED_SPEED = "scored tokens/s"
RECENT_INTERVALS = 5


def recent_speed(speeds: Sequence[float]) -> float | None:
    """Return the recent speed from those of intervals, oldest first; None if there is none."""
    return statistics.median(speeds[-RECENT_INTERVALS:]) if speeds else None


def run_speed(tokens: int, seconds: float) -> float | None:
    """Return the run speed from tokens and seconds of its steps; None before any."""
    return tokens / seconds if tokens and seconds else None
