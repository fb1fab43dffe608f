"""The compute-optimal frontier: the best size N* and its loss at C training FLOPs, by a law, or by
power laws through each budget's lowest run (approach 1) or parabola (approach 2).

The true valley of a budget is not a parabola, so wide or off-center grids bias its vertex.

Legend: F budgets, P points. Source: Hoffmann et al. 2022, sections 3.1 and 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foundation.errors import DataError
from pretrain.scaling.intervals import Interval, jackknife, students
from pretrain.scaling.law import FEWEST_FREE, FEWEST_GROUPS, FlopsLaw, LawLine, ParametricFit
from pretrain.scaling.table import Array, Points
from pretrain.terminal.text import counted

FEWEST_FOR_FLOOR = 4  # budgets, to tell a floor of the loss from a plain power law
FEWEST_SIZES = 3
MOST_NAMED = 2  # budgets without a vertex
GOOD_SIZES = 5
REACH = 6.0  # a parabola goes through the sizes within this factor of its budget's lowest run
VERTEX_ERROR = 0.01  # of N*: a parabola's vertex is off by about that, alike at every budget
DECAYS = np.geomspace(0.005, 1.0, 60)
# Of 1,500 sweeps of a kind its interval held the truth in 91% to 98.5%.
NO_LOSS = "the loss has none: few budgets show its floor"


def law_of(line: Line) -> LawLine:
    """The line as approach 3's, whose lines are all of laws."""
    assert isinstance(line, LawLine)
    return line


@dataclass(frozen=True)
class Approach:
    """One law's line with its intervals, or why it has no interval."""

    key: str
    title: str
    fit: Fitted | None
    line: Line
    left_out: Sequence[LawLine] = ()  # of a law, without each group of runs
    no_interval: str = ""

    def parameters(self, log_flops: float) -> Interval:
        """N* at C FLOPs."""
        return self._of_size(log_flops, 1.0, lambda line: np.exp(line.log_parameters(log_flops)))

    def tokens(self, log_flops: float, flops_law: FlopsLaw) -> Interval:
        """D* at C FLOPs."""
        c = np.asarray(log_flops)
        return self._of_size(
            log_flops,
            flops_law.power,
            lambda line: np.exp(flops_law.log_tokens(c, line.log_parameters(c))),
        )

    def _of_size(
        self, log_flops: float, power: float, value_of: Callable[[Line], float | Array]
    ) -> Interval:
        """A power of N*: by the scatter of vertices about their line, or by a law."""
        if isinstance(self.line, LawLine):
            return self.interval(value_of)
        line, value = self.line, float(value_of(self.line))
        error = math.hypot(line.level_error, line.power_error * (log_flops - line.center))
        return students(value, power * error, line.free, shared=power * VERTEX_ERROR)

    def power(self) -> Interval:
        """The exponent a of N* ~ C^a."""
        if isinstance(self.line, LawLine):
            return self.interval(lambda line: line.power, is_linear=True)
        return students(self.line.power, self.line.power_error, self.line.free, is_linear=True)

    def loss(self, log_flops: float) -> Interval:
        """Return the least loss at C FLOPs. A law's has an interval; beyond the budgets it
        is NaN where they show no floor.
        """
        if isinstance(self.line, LawLine):
            return self.loss_of(lambda line: line.loss(log_flops))
        is_known = self.line.has_floor or log_flops <= self.line.last + 1e-6
        value = float(self.line.loss(log_flops)) if is_known else math.nan
        return Interval(value, math.nan, math.nan)

    def loss_of(self, value_of: Callable[[LawLine], float | Array]) -> Interval:
        """Any loss that follows from a law. It has half the degrees of freedom: fewer budgets
        determine it.
        """
        return self.interval(value_of, free=max(FEWEST_FREE, (len(self.left_out) - 1) // 2))

    def interval(
        self,
        value_of: Callable[[LawLine], float | Array],
        *,
        is_linear: bool = False,
        free: int = 0,
    ) -> Interval:
        """A number that follows from a law, with its interval; see `jackknife`."""
        with np.errstate(over="ignore"):
            value = float(value_of(law_of(self.line)))
            if not self.left_out:
                return Interval(value, math.nan, math.nan)
            left_out_G = np.array([float(value_of(line)) for line in self.left_out])
        return jackknife(value, left_out_G, free or len(left_out_G) - 1, is_linear=is_linear)

    @property
    def without_interval(self) -> str:
        """Why the optimum, or its loss, has no interval; empty if both have."""
        return self.no_interval or ("" if isinstance(self.line, LawLine) else NO_LOSS)


@dataclass(frozen=True)
class Frontier:
    """Optimal sizes and losses at any FLOPs."""

    log_scale: float  # ln k of N* = k C^a
    power: float  # a
    loss_numbers: tuple[float, float, float]  # E, m and g of the loss E + m C^-g
    has_floor: bool  # else E is 0, as too few budgets show it
    center: float  # ln C around which k and m are taken
    last: float  # ln C of the largest budget
    level_error: float  # standard error of ln k, by the scatter of the places
    power_error: float  # of a
    loss_scatter: float  # standard deviation of ln loss about the curve
    spread: float  # root of the sum of squares of ln C about the center
    count: int  # budgets
    free: int  # degrees of freedom of these errors; 0: too few

    def log_parameters(self, log_flops: float | Array) -> Array:
        """ln N* at C FLOPs."""
        return self.log_scale + self.power * (np.asarray(log_flops) - self.center)

    def loss(self, log_flops: float | Array) -> Array:
        """The least loss at C FLOPs."""
        floor, scale, decay = self.loss_numbers
        return floor + scale * np.exp(-decay * (np.asarray(log_flops) - self.center))

    def loss_interval(self, log_flops: float) -> Interval:
        """Return that loss with an interval by the scatter alone, as of a line through the budgets.

        Alone it is too narrow: it held the truth in 58% to 88% of 100 simulated sweeps of a kind.
        """
        far = (log_flops - self.center) / self.spread
        error = self.loss_scatter * math.hypot(1 / math.sqrt(self.count), far)
        return students(float(self.loss(log_flops)), error, self.free)


def fit_frontier(log_flops_F: Array, n_F: Array, loss_F: Array) -> Frontier:
    """Least-squares lines through two places or more; from FEWEST_FOR_FLOOR on, the loss has a
    floor E >= 0: E + m exp(-g x) is linear in E and m.
    """
    count, center = len(log_flops_F), float(log_flops_F.mean())
    x_F = log_flops_F - center
    power, log_scale = np.polyfit(x_F, n_F, 1)
    slope, log_loss_scale = np.polyfit(x_F, np.log(loss_F), 1)
    has_floor, numbers = count >= FEWEST_FOR_FLOOR, (0.0, math.exp(log_loss_scale), -float(slope))
    if has_floor:
        numbers = _decay_to_floor(x_F, loss_F)
    spread, free = math.sqrt((x_F**2).sum()), max(count - 2, 1)
    scatter = math.sqrt(((n_F - log_scale - power * x_F) ** 2).sum() / free)
    off_F = np.log(loss_F / (numbers[0] + numbers[1] * np.exp(-numbers[2] * x_F)))
    return Frontier(
        log_scale=float(log_scale),
        power=float(power),
        loss_numbers=numbers,
        has_floor=has_floor,
        center=center,
        last=float(log_flops_F.max()),
        level_error=scatter / math.sqrt(count),
        power_error=scatter / spread,
        loss_scatter=math.sqrt((off_F**2).sum() / free),
        spread=spread,
        count=count,
        free=count - 2 if count >= FEWEST_GROUPS else 0,
    )


def _decay_to_floor(x_F: Array, loss_F: Array) -> tuple[float, float, float]:
    """E >= 0, m >= 0 and g of the least squares of E + m exp(-g x), which is linear given g."""
    from scipy.optimize import minimize_scalar, nnls

    def fitted(log_decay: float) -> tuple[Array, float]:
        terms = np.stack([np.ones_like(x_F), np.exp(-np.exp(log_decay) * x_F)], axis=1)
        return nnls(terms, loss_F)

    best = int(np.argmin([fitted(log_decay)[1] for log_decay in np.log(DECAYS)]))
    ends = np.log(DECAYS[[max(best - 1, 0), min(best + 1, len(DECAYS) - 1)]])
    log_decay = minimize_scalar(
        lambda log_rate: fitted(log_rate)[1], bounds=ends, method="bounded", options={"xatol": 1e-9}
    ).x
    (floor, scale), _ = fitted(log_decay)
    return float(floor), float(scale), float(np.exp(log_decay))


def fit_lowest_runs(points: Points) -> FrontierFit:
    """Approach 1, a line through the lowest run of each budget; DataError unless two sizes are
    lowest with a smaller and a larger beside them.
    """
    lowest = []
    for budget in points.budgets:
        mine = np.flatnonzero(points.budget_P == budget)
        best, sizes = mine[points.loss_P[mine].argmin()], points.parameters_P[mine]
        # A winner at the edge of the sizes proves nothing: a size outside might be lower.
        if sizes.min() < points.parameters_P[best] < sizes.max():
            lowest.append(best)
    chosen = points.take(np.array(lowest, int))
    if len(np.unique(chosen.parameters_P)) < 2:
        raise DataError(
            f"{points.source}: approach 1 needs two sizes that are lowest at a budget with a "
            "smaller and a larger on either side; add sizes or budgets"
        )
    logs = np.log(chosen.budget_P), np.log(chosen.parameters_P)
    return FrontierFit(frontier=fit_frontier(*logs, chosen.loss_P))


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
class FrontierFit:
    """The frontier through the vertices of valleys (approach 2), or without them (approach 1)."""

    frontier: Frontier
    valleys: tuple[Valley, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def used(self) -> list[Valley]:
        """The valleys whose vertices the frontier goes through."""
        return [valley for valley in self.valleys if valley.is_used]

    @property
    def bend(self) -> float:
        """The valleys' median second derivative in ln N, relative to the loss; NaN without any."""
        return float(np.median([valley.bend / valley.loss for valley in self.used] or [np.nan]))

    @property
    def no_interval(self) -> str:
        """Why its sizes have no interval; empty if they have."""
        if self.frontier.free:
            return ""
        used = f"{counted(self.frontier.count, 'budget')} with a lowest size between others"
        return f"{used}; an interval needs {FEWEST_GROUPS}"

    def line(self, flops_law: FlopsLaw) -> Frontier:
        return self.frontier

    def losses(self, points: Points) -> Array:
        c_P = np.log(points.flops_P)
        off_P = np.log(points.parameters_P) - self.frontier.log_parameters(c_P)
        loss_P = self.frontier.loss(c_P) * (1 + self.bend / 2 * off_P**2)
        return np.where(np.abs(off_P) <= np.log(REACH), loss_P, np.nan)


def fit_isoflop(points: Points) -> FrontierFit:
    """Parabolas of all budgets; DataError when fewer than two have a vertex inside their sizes."""
    points = near_lowest(points)
    valleys = tuple(_valley(points, budget) for budget in points.budgets)
    used = [valley for valley in valleys if valley.is_used]
    if len(used) < 2:
        raise DataError(
            f"{points.source}: {len(used)} of {len(valleys)} budgets have a vertex, approach 2 "
            f"needs two ({_reasons([valley for valley in valleys if not valley.is_used])})"
        )
    columns = [(valley.budget, valley.parameters, valley.loss) for valley in used]
    budget_F, size_F, loss_F = np.array(columns).T
    frontier = fit_frontier(np.log(budget_F), np.log(size_F), loss_F)
    return FrontierFit(frontier=frontier, valleys=valleys, warnings=tuple(_warnings(valleys)))


# A fitted law has `losses` of runs (NaN where it predicts none), and its `line` of optima.
Fitted = ParametricFit | FrontierFit
Line = LawLine | Frontier


def near_lowest(points: Points) -> Points:
    """The runs within REACH times of their budget's lowest run, and never fewer than its nearest
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
        near_P[mine[distance <= max(np.log(REACH), nearest) + 1e-9]] = True
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
    vertex, bottom, bend, apart = parabola(x_S, mine.loss_P)
    if not bend > 0:
        return replace(valley, reason="the losses curve downward: there is no lowest size")
    with np.errstate(over="ignore"):  # a nearly straight line has its vertex anywhere
        size = float(np.exp(vertex))
    reason = ""
    if not bottom > 0:
        reason = "the parabola's lowest loss is negative: is a run an outlier?"
    elif apart > 1:
        side = "above" if size > largest else "below"
        reason = (
            f"vertex {size:.3g} is {side} the sizes {smallest:.3g}..{largest:.3g}: add runs there"
        )
    return replace(valley, parameters=size, loss=bottom, bend=bend, reason=reason)


def parabola(x_S: Array, loss_S: Array) -> tuple[float, float, float, float]:
    """The vertex, the loss there and the second derivative of the least-squares parabola; and how
    far the vertex is from the middle of x_S, in half widths.
    """
    middle, half = (x_S.max() + x_S.min()) / 2, np.ptp(x_S) / 2
    curve, slope, level = map(float, np.polyfit((x_S - middle) / half, loss_S, 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        vertex = float(-slope / np.float64(2 * curve))
        bottom = float(level - slope**2 / np.float64(4 * curve))
    return middle + half * vertex, bottom, 2 * curve / half**2, abs(vertex)


def _reasons(unused: list[Valley]) -> str:
    """Why these budgets are not used, but for some of many."""
    more = len(unused) - MOST_NAMED
    named = [f"{valley.budget:.3g}: {valley.reason}" for valley in unused[:MOST_NAMED]]
    return "; ".join([*named, f"and {more} more"] if more > 0 else named)


def _warnings(valleys: tuple[Valley, ...]) -> list[str]:
    unused = [valley for valley in valleys if not valley.is_used]
    few = [valley for valley in valleys if valley.is_used and valley.num_sizes < GOOD_SIZES]
    lines = []
    if unused:
        lines.append(f"{counted(len(unused), 'budget')} not used ({_reasons(unused)})")
    if few:
        lines.append(
            f"{counted(len(few), 'budget')} of fewer than {GOOD_SIZES} sizes, where one run moves "
            f"the vertex far: {few[0].budget:.3g}{' and others' if few[1:] else ''}"
        )
    return lines
