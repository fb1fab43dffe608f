"""Intervals, and numbers as text: fixed digits for estimates, few for counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pretrain.scaling.table import Array
from pretrain.terminal.text import prefixed, si

UNBOUNDED = 1e6  # times the estimate: an end farther away bounds nothing
LEVEL = 95  # percent
ENDS = [(100 - LEVEL) / 2, (100 + LEVEL) / 2]
ROUNDING = 1e-9
ERRORS = "errors are predicted minus measured (+: the prediction is too high)"


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


def interval(value: float | Array, draws_K: Array) -> Interval:
    """The estimate with the percentiles of its draws.

    NaN ends if fewer than half have a value, or if the estimate is not between them: then they are
    no interval of it.
    """
    draws_K = np.asarray(draws_K, float)
    finite = draws_K[np.isfinite(draws_K)]
    if len(finite) < max(2, len(draws_K) / 2):
        return Interval(float(value), np.nan, np.nan)
    low, high = np.percentile(finite, ENDS)
    if not low * (1 - ROUNDING) <= value <= high * (1 + ROUNDING):
        return Interval(float(value), np.nan, np.nan)
    return Interval(float(value), float(low), float(high))


def range_of(value: float | Array, values_K: Array) -> Interval:
    """The estimate with the range of its values over a confidence region."""
    value = float(value)
    there = values_K[~np.isnan(values_K)]  # a law of the region may lack the value
    if not len(there):
        return Interval(value, np.nan, np.nan)
    low, high = min(float(there.min()), value), max(float(there.max()), value)
    is_positive = value > 0
    return Interval(
        value,
        0.0 if is_positive and low < value / UNBOUNDED else low,
        math.inf if is_positive and high > value * UNBOUNDED else high,
    )


def shown(interval: Interval, text: Callable[[float], str]) -> str:
    """An interval as `value [low, high]`, each number formatted by `text`; the value alone where
    there is no interval.
    """
    if math.isnan(interval.low) and math.isnan(interval.high):
        return text(interval.value)
    return f"{text(interval.value)} [{text(interval.low)}, {text(interval.high)}]"


def amount(value: float) -> str:
    """Parameters or tokens as they were requested or counted: `10M`, `2.2G`."""
    return si(value).replace(" ", "")


def as_size(value: float) -> str:
    """Estimated parameters or tokens: `10.0M`, `2.20G`, `-` for none."""
    if not math.isfinite(value):
        return "-"
    number, prefix = prefixed(value)
    return f"{number:#.3g}".rstrip(".") + prefix


def as_loss(value: float) -> str:
    """A loss in nats per token: `1.6640`."""
    return f"{value:.4f}" if math.isfinite(value) else "-"


def as_exponent(value: float) -> str:
    """An exponent: `0.466`."""
    return f"{value:.3f}" if math.isfinite(value) else "-"


def as_factor(value: float) -> str:
    """A constant of the law: `1606`."""
    return f"{value:.4g}" if math.isfinite(value) else "-"
