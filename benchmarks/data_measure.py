"""Costs measured in turns within one run, and the table of what was found."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pretrain.terminal.text import markdown_table

TOLERANCE = (
    1.15  # machines and neighbours differ: a goal is missed when it is missed by more than this
)


@dataclass(frozen=True)
class Row:
    """One line of the table. A goal is a bound from above; 0: there is none, the number is there to compare with."""

    name: str
    value: float
    goal: float
    unit: str

    @property
    def passes(self) -> bool:
        return not self.goal or self.value <= TOLERANCE * self.goal


def medians(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of what each case returns. One round that does not count comes first; every other one runs backwards,
    so that no case always meets the cache that another one left."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(rounds + 1):
        for name in names if number % 2 else names[::-1]:
            value = cases[name]()
            if number:
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    cells = [["what", "measured", "goal", ""]]
    for row in rows:
        goal = f"at most {row.goal:g} {row.unit}" if row.goal else ""
        verdict = (
            ""
            if not row.goal
            else "ok"
            if row.value <= row.goal
            else "close"
            if row.passes
            else "MISSED"
        )
        cells.append([row.name, f"{row.value:.3g} {row.unit}", goal, verdict])
    return markdown_table(cells)
