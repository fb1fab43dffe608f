"""How far laws are off on sweeps that others published: `python -m tests.published_sweeps FOLDER`.

FOLDER has a CSV per sweep with N, D, loss and budget; docs/scaling.md names the sources. The
largest budget with a vertex is predicted from those up to a fraction of it. A row per distance and
law: the median and the 85th percentile of |ln| of N* and of the error of the loss, how many of the
printed intervals hold, and their median width.
"""

import argparse
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from foundation.errors import DataError
from pretrain.scaling.fit import TITLES, Fit, fit_all
from pretrain.scaling.frontier import Approach, Valley, fit_isoflop
from pretrain.scaling.law import FEWEST_GROUPS
from pretrain.scaling.table import Columns, Points, read_points, usable
from pretrain.terminal.text import fitted_table

TIMES = (4.0, 10.0, 30.0)
FIRST = "the law that comes first"
Errors = dict[str, list[tuple[float, ...]]]


def highest_valley(points: Points) -> Valley | None:
    """Return the valley of the largest budget that has a vertex."""
    try:
        return fit_isoflop(points).used[-1]
    except DataError:
        return None


def errors_of(fit: Fit, approach: Approach, valley: Valley) -> tuple[float, ...]:
    """Return logarithms: errors of N* and loss at the valley, half widths of their intervals."""
    size, _, loss = fit.optimum(approach, valley.budget)
    pairs = ((size, valley.parameters), (loss, valley.loss))
    errors = [math.log(interval.value / measured) for interval, measured in pairs]
    return (*errors, *(math.log(interval.high / interval.value) for interval, _ in pairs))


def measure(paths: list[Path]) -> dict[float, Errors]:
    """Return the errors of each law at each distance."""
    found: dict[float, Errors] = {times: defaultdict(list) for times in TIMES}
    for path in paths:
        points = usable(read_points(path, Columns.parse([])))
        if (valley := highest_valley(points)) is None:
            continue
        for times in TIMES:
            below = points.take(points.budget_P <= 1.01 * valley.budget / times)
            if len(below.budgets) < FEWEST_GROUPS:
                continue
            try:
                fit = fit_all(below)
            except DataError:
                continue
            for approach in fit.approaches:
                found[times][approach.title].append(errors_of(fit, approach, valley))
            found[times][FIRST].append(errors_of(fit, fit.approaches[0], valley))
    return found


def table(found: dict[float, Errors]) -> list[list[str]]:
    """Heads and a row per distance and law."""
    rows = [
        [
            "times",
            "law",
            "sweeps",
            "|ln N*|",
            "85%",
            "|loss|",
            "85%",
            "N* held",
            "loss held",
            "widths",
        ]
    ]
    for times, errors in found.items():
        for title in (FIRST, *TITLES.values()):
            if not errors[title]:
                continue
            size, loss, size_half, loss_half = np.array(errors[title]).T
            row = [f"{times:g}", title, str(len(size))]
            row += [f"{np.percentile(np.abs(size), part):.2f}" for part in (50, 85)]
            row += [f"{np.nanpercentile(np.abs(loss), part):.1%}" for part in (50, 85)]
            for off, half in ((size, size_half), (loss, loss_half)):
                held, known = (np.abs(off) <= half).sum(), np.isfinite(half).sum()
                row.append(f"{held}/{known}" if known else "-")
            widths = [np.exp(2 * np.nanmedian(half)) for half in (size_half, loss_half)]
            rows.append([*row, f"{widths[0]:.1f}x {widths[1] - 1:.0%}" if known else "-"])
    return rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(fitted_table(table(measure(sorted(parser.parse_args().folder.glob("*.csv"))))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
