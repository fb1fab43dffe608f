"""How far the approaches agree with each other: on the optimal size, and on the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from pretrain.scaling import wording
from pretrain.scaling.lines import Approach, Interval

DISAGREEMENT = 1.5  # between the approaches' N*, above which it is said
BEYOND = 10.0  # agreement is also measured at this multiple of the largest budget
SEEN = 1e-4  # of the loss: ends of intervals that are nearer to each other look the same


def disagreement(approaches: Sequence[Approach], log_flops: float) -> float:
    """The largest N* over the smallest that the approaches name at C FLOPs."""
    sizes = np.array([float(approach.line.log_parameters(log_flops)) for approach in approaches])
    finite = sizes[np.isfinite(sizes)]
    return float(np.exp(np.ptp(finite))) if len(finite) else np.nan


def beyond(largest: float) -> tuple[float, str]:
    """The FLOPs beyond the largest budget at which approaches are compared, and where that is in words."""
    return BEYOND * largest, f"{BEYOND * largest:.3g} FLOPs, {BEYOND:.0f} times the largest budget"


def warnings_of(approaches: Sequence[Approach], largest: float) -> list[str]:
    """Where the approaches contradict each other, at the largest budget and beyond it."""
    found: list[str] = []
    for flops, where in ((largest, f"{largest:.3g} FLOPs, the largest budget"), beyond(largest)):
        log_flops = float(np.log(flops))
        ratio = disagreement(approaches, log_flops)
        if ratio > DISAGREEMENT:
            found.append(f"at {where}, the approaches' optimal sizes differ {ratio:.2f}x")
        found += contradictions(
            {each.title: each.loss(log_flops) for each in approaches}, f"at {where}"
        )
    return found


def contradictions(losses: Mapping[str, Interval], where: str) -> list[str]:
    """One line when two intervals of the loss, by approach, have nothing in common; none when all overlap."""
    texts = {title: wording.shown(interval, wording.loss) for title, interval in losses.items()}
    pairs = [
        f"{first} {texts[first]} and {second} {texts[second]}"
        for first, second in combinations(losses, 2)
        if _are_apart(losses[first], losses[second])
    ]
    if not pairs:
        return []
    return [
        f"{where}, the intervals of the loss do not overlap: {'; '.join(pairs)}; an interval holds the scatter of "
        "the runs, not an approach's own bias; trust none of them alone"
    ]


def _are_apart(first: Interval, second: Interval) -> bool:
    gap = max(first.low, second.low) - min(first.high, second.high)
    return bool(gap > SEEN * max(first.value, second.value))  # False where an end is NaN
