"""How a cost grows with the number of ranks, from measurements at a few numbers of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

FLAT = 0.15  # relative; a cost whose measurements differ by no more is constant
LAWS: dict[str, Callable[[float], float]] = {"log": math.log2, "linear": lambda size: size}


@dataclass(frozen=True)
class Growth:
    """`base`, and `slope` times the size or its logarithm; `law` is "constant" without a slope."""

    law: str
    base: float
    slope: float = 0.0

    def at(self, size: float) -> float:
        """Return the cost at a size."""
        return self.base + (self.slope * LAWS[self.law](size) if self.slope else 0.0)

    def describe(self, of: str) -> str:
        """Return the law as text: `of` is what sizes count."""
        if not self.slope:
            return "constant"
        term = f"log2({of})" if self.law == "log" else of
        if abs(self.base) < 1e-6 * self.slope:
            return f"{self.slope:.3g} {term}"
        sign = "+" if self.base >= 0 else "-"
        return f"{self.slope:.3g} {term} {sign} {abs(self.base):.3g}"


def growth_of(measured: Mapping[int, float]) -> Growth:
    """Return the law that fits three or more measurements best.

    Constant if they differ by less than FLAT or do not grow; else logarithmic or linear, whichever
    has the smaller relative errors.
    """
    sizes, costs = list(measured), np.array(list(measured.values()), float)
    assert len(sizes) >= 3, "two sizes cannot tell a logarithm from a line"
    mean = float(costs.mean())
    if costs.max() - costs.min() <= FLAT * mean:
        return Growth("constant", mean)
    best, least = Growth("constant", mean), math.inf
    weights = 1 / np.maximum(costs, 1e-3 * mean)
    for law, term in LAWS.items():
        columns = np.array([[1.0, term(size)] for size in sizes])
        solution, *_ = np.linalg.lstsq(columns * weights[:, None], costs * weights, rcond=None)
        base, slope = map(float, solution)
        error = float((((columns @ solution - costs) * weights) ** 2).sum())
        if slope > 0 and error < least:
            best, least = Growth(law, base, slope), error
    return best
