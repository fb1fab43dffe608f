"""What every approach answers, in one form: the optimal size and loss at C FLOPs, with draws of a bootstrap beside it.

Legend: K draws, X values of ln C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pretrain.scaling.law import FlopsLaw, exponents, log_loss, log_optimum
from pretrain.scaling.points import Array

LEVEL = 95  # per cent, of every interval


class Line(Protocol):
    """A compute-optimal line (one, or one per draw)."""

    def log_parameters(self, log_flops: float | Array) -> Array: ...

    def loss(self, log_flops: float | Array) -> Array: ...

    def exponents(self, flops_law: FlopsLaw) -> tuple[Array, Array]: ...


@dataclass(frozen=True)
class LawLine:
    """The optimal line that laws theta [5] or [K, 5] imply."""

    theta: Array
    flops_law: FlopsLaw

    def log_parameters(self, log_flops: float | Array) -> Array:
        """ln N* at C FLOPs."""
        return log_optimum(self.theta, log_flops, self.flops_law)[0]

    def loss(self, log_flops: float | Array) -> Array:
        """L(N*, D*) at C FLOPs."""
        n, d = log_optimum(self.theta, log_flops, self.flops_law)
        return np.exp(log_loss(self.theta, n[..., None], d[..., None])[..., 0])

    def exponents(self, flops_law: FlopsLaw) -> tuple[Array, Array]:
        """The powers a, b of C in N* ~ C^a and D* ~ C^b."""
        return exponents(self.theta, flops_law)


@dataclass(frozen=True)
class Interval:
    """An estimate and the percentiles 2.5 and 97.5 of its bootstrap draws."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """How many times the low end the high end is."""
        return self.high / self.low if self.low > 0 else np.inf


def interval(value: float | Array, draws_K: Array) -> Interval:
    """The interval of these draws around the estimate; NaN ends where fewer than half the draws have a value."""
    draws_K = np.asarray(draws_K, float)
    finite = draws_K[np.isfinite(draws_K)]
    if len(finite) < max(2, len(draws_K) / 2):
        return Interval(float(value), np.nan, np.nan)
    low, high = np.percentile(finite, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Interval(float(value), float(low), float(high))


@dataclass(frozen=True)
class Approach:
    """One approach's line, its draws, and what the reader must know about it."""

    key: str
    title: str
    line: Line
    draws: Line
    warnings: tuple[str, ...] = ()

    def parameters(self, log_flops: float) -> Interval:
        """N* at C FLOPs."""
        return interval(
            np.exp(self.line.log_parameters(log_flops)),
            np.exp(self.draws.log_parameters(log_flops)),
        )

    def loss(self, log_flops: float) -> Interval:
        """The least loss at C FLOPs."""
        return interval(self.line.loss(log_flops), self.draws.loss(log_flops))

    def tokens(self, log_flops: float, flops_law: FlopsLaw) -> Interval:
        """D* at C FLOPs."""
        values = (
            flops_law.log_tokens(np.asarray(log_flops), line.log_parameters(log_flops))
            for line in (self.line, self.draws)
        )
        return interval(*(np.exp(value) for value in values))

    def powers(self, flops_law: FlopsLaw) -> tuple[Interval, Interval]:
        """The exponents a and b."""
        (a, b), (a_K, b_K) = self.line.exponents(flops_law), self.draws.exponents(flops_law)
        return interval(a, a_K), interval(b, b_K)
