"""Writes what `make scaling-demo` found into a page: `python -m tests.worked_example`.

A block of docs/scaling-example.md is between `<!-- scaling-demo: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import io
import re
import shutil
import textwrap
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

from pretrain.cli import main as pretrain
from pretrain.scaling.collect import row_of, shown_rows
from pretrain.scaling.fit import fit_all
from pretrain.scaling.rates import tuned_rates, tuned_table, verdicts
from pretrain.scaling.report import fit_lines
from pretrain.scaling.sweep_file import read_sweep
from pretrain.scaling.table import read_points
from pretrain.scaling.which_runs import PlacedCell, cells_of
from pretrain.terminal.text import fitted_table

DOCS = Path(__file__).parents[1] / "docs"
DEMO = Path("runs/scaling-demo")
CHARTS = ("isoflop", "frontier", "sizes")
WIDTH = 96
BLOCK = re.compile(r"(<!-- scaling-demo: (\w+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def blocks_of(demo: Path) -> dict[str, str]:
    """What the demo in this folder found, by the names of the page's blocks."""
    cells = placed_cells(demo / "tune.yaml", demo / "tune")
    tuned = tuned_rates([row_of(cell) for cell in cells])
    rows = [row_of(cell) for cell in placed_cells(demo / "sweep.yaml", demo / "cells")]
    fit = fit_all(read_points(demo / "runs.csv"))
    predicted = printed("predict", demo, "--flops", "3.6e12", "--force")
    served = printed("predict", demo, "--flops", "7.2e11", "--inference-tokens", "20M", "--force")
    found = {
        "rate": [fitted_table(tuned_table(tuned)), *verdicts(tuned)],
        "runs": [fitted_table(shown_rows(rows))],
        "fit": fit_lines(fit),
        "prediction": [predicted],
        "serving": [served[served.index("to serve") :]],
    }
    return {name: indented("\n".join(lines)) for name, lines in found.items()}


def placed_cells(sweep: Path, runs: Path) -> list[PlacedCell]:
    return cells_of(read_sweep(sweep), sweep, runs)


def printed(action: str, demo: Path, *flags: str) -> str:
    """What `pretrain scale ACTION` prints about the demo's runs."""
    with redirect_stdout(io.StringIO()) as output:
        assert pretrain(["scale", action, str(demo / "runs.csv"), *flags]) == 0
    return output.getvalue()


def indented(text: str) -> str:
    """The text as a block of code; sentences are wrapped, tables are not."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        is_sentence = len(line) > WIDTH and "  " not in line.strip()
        lines += textwrap.wrap(line, WIDTH, subsequent_indent="  ") if is_sentence else [line]
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with these blocks; KeyError for one that the demo does not fill."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2]]}\n{found[4]}", page)


if __name__ == "__main__":
    PAGE = DOCS / "scaling-example.md"
    PAGE.write_text(filled(PAGE.read_text(), blocks_of(DEMO)))
    for chart in CHARTS:
        shutil.copy(DEMO / "report" / f"{chart}.png", DOCS / "images" / f"scaling-{chart}.png")
