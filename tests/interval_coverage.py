"""How often the intervals of a fit hold the truth, on sweeps whose law is known: `make coverage`.

Three laws, noise of 0.5% and 2%, four to six budgets of five sizes from 1/4 to 4 times the best.
The noise is of NOISES: independent; of budgets, three times that of runs; twice as large in the
smaller models; or with a run that a mistuned rate lifts by four times the level. HARDER is noise of
budgets that grows from half the level to twice; and with independent noise, sizes whose center
drifts between two factors from 1/3 to 3, sizes 2.5x apart, and a law as skew as SODA's.
`python -m tests.interval_coverage` prints the table of docs/scaling.md and ends with status 1 if a
share cannot be between WANTED. The rules were chosen on sweeps of seeds below FIRST_SEED, and the
table is of others.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from foundation.errors import DataError
from pretrain.scaling.fit import approach_of
from pretrain.scaling.frontier import Approach, fit_isoflop
from pretrain.scaling.intervals import Interval
from pretrain.scaling.law import Law, LawLine, fit_parametric
from pretrain.scaling.table import Points
from pretrain.terminal.text import fitted_table
from tests.helpers.scaling import BESIROGLU, CS336, HOFFMANN, SIX_N, SODA, simulated

LAWS = (HOFFMANN, BESIROGLU, CS336)
LEVELS = (0.005, 0.02)
NOISES = ("independent", "shared", "uneven", "mistuned")
HARDER = ("growing", "off center", "wide", "skew")
BUDGETS = (4, 5, 6)
QUANTITIES = ("a", "N*", "N* 10x", "loss", "loss 10x")
RANGE = (1e18, 1e20)
SIZES = 5
APART, WIDE = 2.0, 2.5  # neighboring sizes
MOST_OFF = 3.0  # a budget's center, times the best size, either way
REPLICATES = 100
FIRST_SEED = 7_000_001
WANTED = (0.92, 0.98)
DEVIATIONS = 2.6  # of a share from WANTED that chance explains


@dataclass(frozen=True)
class Sweep:
    """A simulated sweep."""

    law: Law
    level: float  # of the noise
    kind: str  # of NOISES or HARDER
    budgets: int
    seed: int


@dataclass(frozen=True)
class Cell:
    """One number of the table: an approach on a kind of sweep with a number of budgets."""

    approach: str
    kind: str
    level: float
    budgets: int


@dataclass
class Tally:
    """How many sweeps there were, and of each quantity how many intervals, and how many held the
    truth.
    """

    sweeps: int = 0
    held: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, name: str, is_held: bool) -> None:
        held, answered = self.held.get(name, (0, 0))
        self.held[name] = held + is_held, answered + 1

    def share(self, quantity: str) -> float:
        held, answered = self.held[quantity]
        return held / answered

    def percent(self, quantity: str) -> str:
        if quantity not in self.held:
            return "-"
        return f"{100 * self.share(quantity):.0f}{'!' * self.is_off(quantity)}"

    def is_off(self, quantity: str) -> bool:
        """Whether chance does not explain how far the share is from WANTED."""
        share, (low, high) = self.share(quantity), WANTED
        nearest = min(max(share, low), high)
        error = np.sqrt(nearest * (1 - nearest) / self.held[quantity][1])
        return bool(abs(share - nearest) > DEVIATIONS * error)


def noisy(sweep: Sweep) -> Points:
    """The runs of a sweep."""
    rng, centers = np.random.default_rng(sweep.seed), np.ones(sweep.budgets)
    if sweep.kind == "off center":
        first, last = MOST_OFF ** rng.uniform(-1, 1, 2)
        centers = np.geomspace(first, last, sweep.budgets)
    points = simulated(
        sweep.law,
        budgets=(*RANGE, sweep.budgets),
        num_sizes=SIZES,
        spread=(WIDE if sweep.kind == "wide" else APART) ** (SIZES // 2),
        centers=centers,
    )
    noise_P = sweep.level * rng.standard_normal(len(points))
    if sweep.kind in ("shared", "growing"):
        growth = 2.0 if sweep.kind == "growing" else 1.0
        size_F = sweep.level * np.geomspace(1 / growth, growth, sweep.budgets)
        noise_P = noise_P / 3 + np.repeat(size_F * rng.standard_normal(sweep.budgets), SIZES)
    elif sweep.kind == "uneven":
        noise_P *= np.where(points.parameters_P < np.median(points.parameters_P), 2, 1)
    elif sweep.kind == "mistuned":
        noise_P[rng.integers(len(points))] += 4 * sweep.level
    return replace(points, loss_P=points.loss_P * np.exp(noise_P))


def quantities(approach: Approach) -> dict[str, Interval]:
    """The intervals that `fit` prints: at the largest budget and at ten times that."""
    near, far = np.log(RANGE[1]), np.log(10 * RANGE[1])
    return {
        "a": approach.power(),
        "N*": approach.parameters(near),
        "N* 10x": approach.parameters(far),
        "loss": approach.loss(near),
        "loss 10x": approach.loss(far),
    }


def approaches_on(points: Points) -> list[Approach]:
    """Those approaches to these runs that have intervals, as `fit` makes them."""
    found = []
    for key, fit in (("isoflop", fit_isoflop), ("parametric", fit_parametric)):
        try:
            found.append(approach_of(key, fit(points), points, SIX_N))
        except DataError:
            continue
    return found


def measure(sweeps: Iterable[Sweep]) -> dict[Cell, Tally]:
    """The tallies of all approaches that give an interval."""
    tallies: dict[Cell, Tally] = defaultdict(Tally)
    for sweep in sweeps:
        truth = quantities(Approach("truth", "truth", None, LawLine(sweep.law, SIX_N)))
        for approach in approaches_on(noisy(sweep)):
            cell = Cell(approach.title, sweep.kind, sweep.level, sweep.budgets)
            tallies[cell].sweeps += 1
            for name, each in quantities(approach).items():
                if np.isfinite(each.low) or np.isfinite(each.high):
                    tallies[cell].add(name, each.low <= truth[name].value <= each.high)
    return dict(tallies)


def grid(kinds: Sequence[str], replicates: int, seed: int = FIRST_SEED) -> Iterator[list[Sweep]]:
    """The sweeps of each cell of the grid; every sweep has a seed of its own, from `seed` on."""
    for kind, level, budgets in itertools.product((*NOISES, *HARDER), LEVELS, BUDGETS):
        laws = [law for law in LAWS for _ in range(replicates)]
        if kind == "skew":
            laws = [SODA] * len(laws)
        if kind in kinds:
            yield [Sweep(law, level, kind, budgets, seed + index) for index, law in enumerate(laws)]
        seed += len(laws)


def table(tallies: dict[Cell, Tally]) -> list[list[str]]:
    """A row per approach and noise, and in every cell a number for each of BUDGETS: of how many
    sweeps there is an interval, and the share of those that hold the truth, in percent. `!` marks a
    share that chance does not explain.
    """
    rows = [["approach", "kind", "level", "intervals", *QUANTITIES]]
    kinds = sorted({(cell.approach, cell.kind, cell.level) for cell in tallies})
    for approach, kind, level in kinds:
        mine = [tallies.get(Cell(approach, kind, level, count), Tally()) for count in BUDGETS]
        answered = "/".join(str(tally.held.get("a", (0, 0))[1]) for tally in mine)
        shares = ["/".join(tally.percent(name) for tally in mine) for name in QUANTITIES]
        rows.append([approach, kind, f"{level:.1%}", answered, *shares])
    return rows


def main() -> int:
    """Print the table; status 1 if a share is off."""
    kinds = (*NOISES, *HARDER)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=REPLICATES, help="per law and cell")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="default: all")
    arguments = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        parts = pool.map(measure, grid(arguments.kinds, arguments.replicates, arguments.first_seed))
        tallies = {cell: tally for part in parts for cell, tally in part.items()}
    print(fitted_table(table(tallies)))
    off = [cell for cell, tally in tallies.items() if any(map(tally.is_off, tally.held))]
    return int(bool(off))


if __name__ == "__main__":
    raise SystemExit(main())
