"""Intervals of estimates: the jackknife over groups of runs, by Student's t; and numbers as text.

Every interval is by Student's t of the scatter between budgets, whose runs share more than noise:
of vertices about their line, or of the jackknife's estimates, each without one budget. Sources:
Efron and Tibshirani 1993, chapter 11; Bell and McCaffrey 2002 for Student's t.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pretrain.scaling.table import Array
from pretrain.terminal.text import prefixed, si

LEVEL = 95  # percent
MOST_GROUPS = 20  # of many budgets every twentieth is one group
NORMAL = 1.96  # standard deviations on either side that hold 95%
Text = Callable[[float], str]  # how a number is written
as_exponent: Text = "{:.3f}".format
as_factor: Text = "{:.4g}".format  # a constant of a law


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval: NaN without an interval."""

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
    """Return the estimate with its 95% interval, from the estimates without each group.

    The interval is of the logarithm, so that both ends are positive, unless `is_linear`. There are
    no ends where one group alone determines the value.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        off_G = left_out_G if is_linear else np.log(left_out_G)
        scatter = np.sqrt((1 - 1 / len(off_G)) * ((off_G - off_G.mean()) ** 2).sum())
    return students(value, float(scatter), free, is_linear=is_linear)


def students(
    value: float, error: float, free: int, *, is_linear: bool = False, shared: float = 0.0
) -> Interval:
    """Return the estimate with its 95% interval by Student's t with `free` degrees of freedom.

    `error` is the standard error of the value or, unless `is_linear`, of its logarithm; `shared`
    the same of an error that no scatter shows.
    """
    from scipy.special import stdtrit

    with np.errstate(invalid="ignore", over="ignore"):
        half = np.hypot(stdtrit(free, 0.5 + LEVEL / 200) * error, NORMAL * shared)
        ends = (value - half, value + half) if is_linear else value * np.exp([-half, half])
    if not (free > 0 and np.isfinite(ends).all()):
        return Interval(value, np.nan, np.nan)
    return Interval(value, float(ends[0]), float(ends[1]))


def widened(interval: Interval, error: float) -> Interval:
    """Return the interval of a logarithm, whose half widths get another `error` (quadratically)."""
    value, low, high = interval.value, interval.low, interval.high
    if not error or not low > 0:
        return interval
    halves = [math.hypot(error, math.log(end / value)) for end in (low, high)]
    return Interval(value, value * math.exp(-halves[0]), value * math.exp(halves[1]))


def shown(interval: Interval, text: Text) -> str:
    """Return an interval as `value [low, high]`, the value alone where there is no interval."""
    value, low, high = map(text, vars(interval).values())
    return value if math.isnan(interval.low) else f"{value} [{low}, {high}]"


def amount(value: float) -> str:
    """Return parameters or tokens as they were requested or counted: `10M`, `2.2G`."""
    return si(value).replace(" ", "")


def as_size(value: float) -> str:
    """Return estimated parameters or tokens: `10.0M`, `2.20G`, `-` for none."""
    number, prefix = prefixed(value)
    return f"{number:#.3g}".rstrip(".") + prefix if math.isfinite(value) else "-"


def as_loss(value: float) -> str:
    """Return nats per token: `1.6640`, `-` for none."""
    return f"{value:.4f}" if math.isfinite(value) else "-"
