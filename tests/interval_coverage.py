"""How often the intervals of a fit hold the truth, on sweeps whose law is known: `make coverage`.

Three laws, noise of 0.5% and 2%, three to five budgets of five sizes from 1/4 to 4 times the best.
`python -m tests.interval_coverage --replicates N` prints the table of docs/scaling.md and ends with
status 1 if a share cannot be between WANTED.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.errors import DataError
from pretrain.scaling.fit import approaches_of
from pretrain.scaling.frontier import Approach, LawLine
from pretrain.scaling.intervals import Interval
from pretrain.scaling.law import Law
from pretrain.scaling.points import Points
from pretrain.terminal.text import fitted_table
from tests.helpers.scaling import BESIROGLU, CS336, HOFFMANN, SIX_N, simulated

LAWS = (HOFFMANN, BESIROGLU, CS336)
NOISES = (0.005, 0.02)
BUDGETS = (3, 4, 5)
RANGE = (1e18, 1e20)
SIZES = 5
REPLICATES = 100
WANTED = (0.93, 0.98)
DEVIATIONS = 2.6  # of a share from WANTED that chance explains


@dataclass(frozen=True)
class Cell:
    """One row of the table: an approach at a noise and a number of budgets."""

    approach: str
    noise: float
    budgets: int


@dataclass
class Tally:
    """How many sweeps had intervals, and for each quantity how many of those held the truth."""

    sweeps: int = 0
    answered: int = 0
    held: dict[str, int] | None = None

    def share(self, quantity: str) -> float:
        assert self.held
        return self.held[quantity] / self.answered

    def is_off(self, quantity: str) -> bool:
        """Whether chance does not explain how far the share is from WANTED."""
        share, (low, high) = self.share(quantity), WANTED
        nearest = min(max(share, low), high)
        error = np.sqrt(nearest * (1 - nearest) / self.answered)
        return abs(share - nearest) > DEVIATIONS * error


def quantities(approach: Approach) -> dict[str, Interval]:
    """The intervals that `fit` prints: at the largest budget and at ten times that."""
    near, far = np.log(RANGE[1]), np.log(10 * RANGE[1])
    return {
        "a": approach.powers(SIX_N)[0],
        "N*": approach.parameters(near),
        "N* 10x": approach.parameters(far),
        "loss": approach.loss(near),
        "loss 10x": approach.loss(far),
    }


def approaches_on(points: Points) -> tuple[Approach, ...]:
    """The approaches to these runs as `fit` makes them; none if the runs allow none."""
    try:
        return approaches_of(points)
    except DataError:
        return ()


def measure(cells: Iterator[tuple[Law, float, int, int]]) -> dict[Cell, Tally]:
    """The tallies over sweeps of (law, noise, number of budgets, seed)."""
    tallies: dict[Cell, Tally] = defaultdict(Tally)
    for law, noise, budgets, seed in cells:
        points = simulated(law, budgets=(*RANGE, budgets), num_sizes=SIZES, noise=noise, seed=seed)
        truth = quantities(Approach("truth", "truth", LawLine(law.theta, SIX_N), None))
        for approach in approaches_on(points):
            tally = tallies[Cell(approach.title, noise, budgets)]
            tally.sweeps += 1
            if approach.region is None:
                continue
            tally.answered += 1
            found = quantities(approach)
            tally.held = tally.held or dict.fromkeys(found, 0)
            for name, each in found.items():
                tally.held[name] += each.low <= truth[name].value <= each.high
    return dict(tallies)


def grid(replicates: int) -> Iterator[tuple[Law, float, int, int]]:
    """The whole grid; every sweep has a seed of its own."""
    seed = 0
    for noise in NOISES:
        for budgets in BUDGETS:
            for law in LAWS:
                for _ in range(replicates):
                    seed += 1
                    yield law, noise, budgets, seed


def table(tallies: dict[Cell, Tally]) -> list[list[str]]:
    """A row per cell that has intervals; `!` marks a share that chance does not explain."""
    rows = [["approach", "noise", "budgets", "with interval"]]
    for cell, tally in sorted(tallies.items(), key=lambda item: item[0].approach):
        if not tally.held:
            continue
        rows[0][4:] = list(tally.held)
        shares = [
            f"{tally.share(name):.1%}{'!' if tally.is_off(name) else ''}" for name in tally.held
        ]
        answered = f"{tally.answered} of {tally.sweeps}"
        rows.append([cell.approach, f"{cell.noise:.1%}", str(cell.budgets), answered, *shares])
    return rows


def main() -> int:
    """Print the table; status 1 if a share is off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=REPLICATES, help="per law and cell")
    tallies = measure(grid(parser.parse_args().replicates))
    print(fitted_table(table(tallies)))
    off = [
        cell for cell, tally in tallies.items() if tally.held and any(map(tally.is_off, tally.held))
    ]
    return int(bool(off))


if __name__ == "__main__":
    raise SystemExit(main())
