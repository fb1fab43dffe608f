"""Intervals, and numbers as text: fixed digits for estimates, few for counts.

Every interval is by Student's t of the scatter between budgets: of vertices about their line, or of
the jackknife's estimates, each without one budget (or group of runs). Runs of one budget share more
than noise, such as a batch size or a rule for the rate, and leaving out whole budgets shows that.
It holds the truth from four budgets on, where a bootstrap of budgets needs six. Sources: Efron and
Tibshirani 1993, chapter 11; Bell and McCaffrey 2002 for Student's t.

Legend: G estimates, each without one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pretrain.scaling.table import Array
from pretrain.terminal.text import prefixed, si

LEVEL = 95  # percent
FEWEST_GROUPS = 4
FEWEST_FREE = 3  # degrees of freedom
MOST_GROUPS = 20  # of many budgets, every twentieth is left out at once
MOST_DECIMALS = 6
NORMAL = 1.96  # standard deviations on either side that hold 95%


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval: NaN where there is none."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The high end divided by the low end; NaN without an interval."""
        return np.inf if self.low <= 0 else self.high / self.low


def groups_of(values: Array) -> Array:
    """The group of each value, from 0 to at most MOST_GROUPS: equal ones are in one group."""
    return np.unique(values, return_inverse=True)[1] % MOST_GROUPS


def jackknife(value: float, left_out_G: Array, free: int, *, is_linear: bool = False) -> Interval:
    """The estimate with its 95% interval, from the estimates without each group.

    It is of the logarithm, so that both ends are positive, unless `is_linear`. There are no ends
    where one of the groups alone determines the value.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        off_G = left_out_G if is_linear else np.log(left_out_G)
        scatter = np.sqrt((1 - 1 / len(off_G)) * ((off_G - off_G.mean()) ** 2).sum())
    return students(value, float(scatter), free, is_linear=is_linear)


def students(
    value: float, error: float, free: int, *, is_linear: bool = False, shared: float = 0.0
) -> Interval:
    """The estimate with its 95% interval by Student's t with `free` degrees of freedom.

    `error` is the standard error of the value or, unless `is_linear`, of its logarithm; `shared`
    that of an error beside it that no scatter shows.
    """
    from scipy.special import stdtrit

    with np.errstate(invalid="ignore", over="ignore"):
        half = np.hypot(stdtrit(free, 0.5 + LEVEL / 200) * error, NORMAL * shared)
        ends = (value - half, value + half) if is_linear else value * np.exp([-half, half])
    if not (free > 0 and np.isfinite(ends).all()):
        return Interval(value, np.nan, np.nan)
    return Interval(value, float(ends[0]), float(ends[1]))


Text = Callable[[float, float], str]  # of a number whose interval is of that half-width, or NaN


def shown(interval: Interval, text: Text) -> str:
    """An interval as `value [low, high]`, to two digits of half its width; the value alone where
    there is no interval.
    """
    half = (interval.high - interval.low) / 2
    if math.isnan(half):
        return text(interval.value, math.nan)
    value, low, high = (text(each, half) for each in vars(interval).values())
    return f"{value} [{low}, {high}]"


def fixed(value: float, half: float = math.nan, usual: str = ".4f") -> str:
    """The number to two digits of `half`, at most MOST_DECIMALS; else by the `usual` format; `-`
    for none.
    """
    if not math.isfinite(value):
        return "-"
    if not 0 < half < math.inf:
        return f"{value:{usual}}"
    digits = abs(value) if 0 < 50 * abs(value) < half else half  # a far wider interval: its own
    decimals = min(1 - math.floor(math.log10(digits)), MOST_DECIMALS)
    return f"{round(value, decimals):.{max(decimals, 0)}f}"


def amount(value: float) -> str:
    """Parameters or tokens as they were requested or counted: `10M`, `2.2G`."""
    return si(value).replace(" ", "")


def as_size(value: float, half: float = math.nan) -> str:
    """Estimated parameters or tokens: `10.0M`, `2.20G`, `-` for none."""
    number, prefix = prefixed(value)
    return fixed(number, half * number / value if value else half, "#.3g").rstrip(".") + prefix


as_loss = fixed  # in nats per token: `1.6640`
as_exponent = partial(fixed, usual=".3f")
as_factor = partial(fixed, usual=".4g")  # a constant of the law
