"""A cost and its goal at 4,096 ranks, and the table of all costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import markdown_table
from benchmarks.scale.growth import growth_of

RANKS = (64, 512, 4096)  # numbers of ranks, on nodes of eight
RANKS_OF_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What was measured at some sizes, which are numbers of ranks if `of` does not say otherwise.

    `targets` are the sizes that belong to RANKS. `at_most` is the goal for the last of them.
    `expected` has costs that follow from other rows, for sizes where growth does not predict them.
    """

    name: str
    measured: Mapping[int, float]
    unit: str = ""
    of: str = "ranks"
    targets: Sequence[int] = RANKS
    expected: Mapping[int, float] = field(default_factory=dict)
    at_most: float | None = None
    detail: str = ""

    def row(self) -> list[str]:
        growth, last = growth_of(self.measured), self.at_4096
        at = ", ".join(f"{size:,}: {_digits(cost)}" for size, cost in self.measured.items())
        goal = "" if self.at_most is None else f"at most {_digits(self.at_most)}"
        result = "" if self.at_most is None else "met" if self.is_met else "MISSED"
        if result == "MISSED" and self.at_most:
            result += f", {last / self.at_most:.2g}x"
        unit = f" ({self.unit})" if self.unit else ""
        cells = [_digits(self._at(size)) for size in self.targets]
        return [self.name + unit, at, growth.describe(self.of), *cells, goal, result, self.detail]

    @property
    def at_4096(self) -> float:
        return self._at(self.targets[-1])

    @property
    def is_met(self) -> bool:
        """Whether the goal is reached; without one there is nothing to miss."""
        if self.at_most is None:
            return True
        return self.at_4096 <= self.at_most or math.isclose(self.at_4096, self.at_most)

    def _at(self, size: int) -> float:
        """Return the cost at a size: measured or expected, else as its growth predicts."""
        known = {**self.expected, **self.measured}
        return known.get(size, max(0.0, growth_of(self.measured).at(size)))


@dataclass(frozen=True)
class Subject:
    """A part of the system, and what measures its costs; it may write into an empty directory."""

    name: str
    measure: Callable[[Path], Iterable[Cost]]


def table_of(rows: Iterable[Cost]) -> str:
    """Return the rows as a Markdown table."""
    ranks = [f"{count:,} ranks" for count in RANKS]
    header = ["what", "measured at", "growth", *ranks, "goal", "result", "how"]
    return markdown_table([header, *(row.row() for row in rows)])


def _digits(value: float) -> str:
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
