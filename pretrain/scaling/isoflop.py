"""Approach 2: at each budget a parabola of the loss in ln N; its vertices are the frontier.

The true valley is not a parabola, so wide or off-center grids bias the vertex; both are warnings.
The interval is Student's of the straight line through the vertices: it holds whatever differs from
budget to budget. Legend: F budgets, K lines, P points, S sizes of one budget.

Source: Hoffmann et al. 2022, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.frontier import FEWEST_FOR_FLOOR, Frontier, fit_frontier
from pretrain.scaling.parabola import frame, parabolas
from pretrain.scaling.points import Array, Points
from pretrain.terminal.text import counted

FEWEST_SIZES = 3
MOST_NAMED = 3  # budgets without a vertex
GOOD_SIZES = 5
REACH = 6.0  # a parabola goes through the sizes within this factor of its budget's lowest run
WIDE_GRID = (
    40.0  # largest size over smallest, beyond which a parabola is a poor picture of the valley
)
# A parabola's vertex is off by some percent of N*, the same at every budget, which scatter does
# not show: a line that is known more closely than this has no interval of its sizes.
FINEST = np.log(1.1)
FEWEST_FOR_INTERVAL = 4  # vertices: of three, one alone measures the scatter around their line
BORDER = np.linspace(0, 2 * np.pi, 128, endpoint=False)
OFF_CENTER = 0.25  # of the grid's width in ln N: a vertex nearer to an edge than this is said


@dataclass(frozen=True, kw_only=True)
class Valley:
    """One budget's parabola: loss = bottom + bend/2 (ln N - ln N*)^2."""

    budget: float
    num_sizes: int
    smallest: float
    largest: float
    parameters: float = np.nan  # N*, the vertex
    loss: float = np.nan  # at the vertex
    bend: float = np.nan
    reason: str = ""  # why the vertex takes no part in the frontier

    @property
    def is_used(self) -> bool:
        return not self.reason


@dataclass(frozen=True, kw_only=True)
class IsoflopFit:
    """Approach 2's valleys and the frontier through their vertices."""

    valleys: tuple[Valley, ...]
    frontier: Frontier
    warnings: tuple[str, ...]
    reach: float
    local: Points  # the runs that the parabolas go through
    num_runs: int  # of which

    @property
    def choice(self) -> str:
        """Which runs the parabolas go through, and why."""
        if math.isinf(self.reach):
            return f"parabolas through all {self.num_runs} runs"
        return (
            f"parabolas through the sizes within {self.reach:g}x of each budget's lowest run, at "
            f"least {GOOD_SIZES}: {len(self.local)} of {counted(self.num_runs, 'run')}"
        )

    @property
    def bend(self) -> float:
        """The valleys' median second derivative in ln N, relative to the loss."""
        used = [valley for valley in self.valleys if valley.is_used]
        return float(np.median([valley.bend / valley.loss for valley in used]))

    def lines(self) -> Frontier:
        """The border [K] of the 95% region of the line; DataError where vertices are too few.

        Over the border any size or power ranges as far as its t interval. Losses have none, and
        sizes none where the line is known more closely than FINEST.
        """
        from scipy.special import stdtrit

        used = [valley for valley in self.valleys if valley.is_used]
        if len(used) < FEWEST_FOR_INTERVAL:
            raise DataError(
                f"{counted(len(used), 'budget')} with a vertex, and the scatter around a line "
                f"needs {FEWEST_FOR_INTERVAL}; add budgets"
            )
        x_F = np.log([valley.budget for valley in used])
        off_F = np.log([valley.parameters for valley in used]) - self.frontier.log_parameters(x_F)
        variance = float((off_F**2).sum()) / (len(used) - 2)
        quantile = float(stdtrit(len(used) - 2, 0.975))
        half_width = quantile * np.sqrt(variance / len(used))
        power_error = np.sqrt(variance / ((x_F - x_F.mean()) ** 2).sum())
        none = np.full(len(BORDER), np.nan)
        return Frontier(
            log_scale=none
            if half_width < FINEST
            else self.frontier.log_scale + half_width * np.cos(BORDER),
            power=self.frontier.power + quantile * power_error * np.sin(BORDER),
            floor=none,
            log_loss_scale=none,
            decay=none,
            center=self.frontier.center,
        )

    def loss_of(self, parameters: Array, flops: Array) -> Array:
        """The losses of single runs within REACH of the optimum; NaN farther from it."""
        off = np.log(parameters) - self.frontier.log_parameters(np.log(flops))
        loss = self.frontier.loss(np.log(flops)) * (1 + self.bend / 2 * off**2)
        return np.where(np.abs(off) <= np.log(REACH), loss, np.nan)


def fit_isoflop(points: Points, reach: float = REACH) -> IsoflopFit:
    """Parabolas of all budgets; DataError when fewer than two have a vertex inside their sizes."""
    num_runs, points = len(points), near_lowest(points, reach)
    valleys = tuple(_valley(points, budget) for budget in points.budgets)
    used = [valley for valley in valleys if valley.is_used]
    if len(used) < 2:
        raise DataError(
            f"{points.source}: {len(used)} of {len(valleys)} budgets have a vertex, approach 2 "
            f"needs two ({_reasons(_unused(valleys))})"
        )
    log_flops_F, n_F, loss_F = (
        np.array([getattr(valley, name) for valley in used])
        for name in ("budget", "parameters", "loss")
    )
    frontier = fit_frontier(np.log(log_flops_F), np.log(n_F), loss_F)
    return IsoflopFit(
        valleys=valleys,
        frontier=frontier,
        warnings=tuple(_warnings(valleys)),
        reach=reach,
        local=points,
        num_runs=num_runs,
    )


def near_lowest(points: Points, reach: float) -> Points:
    """The runs within `reach` times of their budget's lowest run, and never fewer than its nearest
    GOOD_SIZES sizes.
    """
    # Far from its lowest point a valley is steeper on one side, and a parabola through it is off.
    near_P = np.zeros(len(points), bool)
    n_P = np.log(points.parameters_P)
    for budget in points.budgets:
        mine = np.flatnonzero(points.budget_P == budget)
        distance = np.abs(n_P[mine] - n_P[mine[points.loss_P[mine].argmin()]])
        per_size = np.sort(distance[np.unique(n_P[mine], return_index=True)[1]])
        nearest = per_size[min(GOOD_SIZES, len(per_size)) - 1]
        near_P[mine[distance <= max(np.log(reach), nearest) + 1e-9]] = True
    return points.take(near_P)


def _valley(points: Points, budget: float) -> Valley:
    mine = points.take(points.budget_P == budget)
    x_S = np.log(mine.parameters_P)
    num_sizes = len(np.unique(x_S))
    smallest, largest = float(mine.parameters_P.min()), float(mine.parameters_P.max())
    valley = Valley(budget=float(budget), num_sizes=num_sizes, smallest=smallest, largest=largest)
    if num_sizes < FEWEST_SIZES:
        return replace(
            valley, reason=f"{counted(num_sizes, 'size')}, a parabola needs {FEWEST_SIZES}"
        )
    center, half = frame(x_S)
    vertex, bottom, bend = (
        float(v[0]) for v in parabolas((x_S - center) / half, mine.loss_P[None])
    )
    if not bend > 0:
        return replace(valley, reason="the losses curve downward: there is no lowest size")
    with np.errstate(over="ignore"):  # a nearly straight line has its vertex anywhere
        size = float(np.exp(center + half * vertex))
    reason = ""
    if not bottom > 0:
        reason = "the parabola's lowest loss is negative: is a run an outlier?"
    elif abs(vertex) > 1:
        side = "above" if vertex > 0 else "below"
        reason = (
            f"vertex {size:.3g} is {side} the sizes {smallest:.3g}..{largest:.3g}: add runs there"
        )
    return replace(valley, parameters=size, loss=bottom, bend=bend / half**2, reason=reason)


def _unused(valleys: tuple[Valley, ...]) -> list[Valley]:
    return [valley for valley in valleys if valley.reason]


def _reasons(unused: list[Valley]) -> str:
    """Why these budgets are not used, but for some of many."""
    more = len(unused) - MOST_NAMED
    named = [f"{valley.budget:.3g}: {valley.reason}" for valley in unused[:MOST_NAMED]]
    return "; ".join([*named, f"and {more} more"] if more > 0 else named)


def _warnings(valleys: tuple[Valley, ...]) -> list[str]:
    unused, found = _unused(valleys), list[str]()
    if unused:
        found.append(f"{counted(len(unused), 'budget')} not used ({_reasons(unused)})")
    used = [valley for valley in valleys if valley.is_used]

    def budgets_where(is_so: Callable[[Valley], bool]) -> str:
        found = [f"{valley.budget:.3g}" for valley in used if is_so(valley)]
        return f"budget{'s' if len(found) > 1 else ''} {', '.join(found)}" if found else ""

    if few := budgets_where(lambda valley: valley.num_sizes < GOOD_SIZES):
        found.append(
            f"fewer than {GOOD_SIZES} sizes, so that one run moves the vertex far, at {few}"
        )
    if near_edge := budgets_where(_is_off_center):
        found.append(f"the vertex is near the edge of the sizes, which biases it, at {near_edge}")
    if wide := budgets_where(lambda valley: valley.largest / valley.smallest > WIDE_GRID):
        found.append(f"sizes span over {WIDE_GRID:.0f}x, too wide for a parabola, at {wide}")
    if len(used) == 2:
        found.append(
            "two budgets determine a line exactly and leave nothing to check it; add a third"
        )
    elif len(used) < FEWEST_FOR_FLOOR:
        found.append(
            f"{len(used)} budgets show no floor of the loss: extrapolated losses come out too low"
        )
    return found


def _is_off_center(valley: Valley) -> bool:
    edges = valley.parameters / valley.smallest, valley.largest / valley.parameters
    return np.log(min(edges)) < OFF_CENTER * np.log(valley.largest / valley.smallest)
