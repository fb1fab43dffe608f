"""`pretrain golden FILES`: compare the model with recorded results of a reference, in float64."""

from __future__ import annotations

import argparse
from pathlib import Path

from pretrain.terminal.text import text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="golden vectors, .npz")


def run(arguments: argparse.Namespace) -> int:
    """Print one line per file; return 0 if every supported case agrees to 1e-10, else 1."""
    from pretrain.weights.golden import COLUMNS, LIMIT, compare  # late: torch takes seconds

    results = [compare(path) for path in arguments.files]
    rows = [["case", *COLUMNS, "verdict"]]
    for result in results:
        errors = [result.errors.get(column) for column in COLUMNS]
        cells = ["-" if error is None else f"{error:.1e}" for error in errors]
        rows.append([result.name, *cells, result.verdict])
    print(text_table(rows, left=(0, -1)))
    supported = [result for result in results if not result.note]
    passed = [result for result in supported if result.verdict == "ok"]
    print(
        f"\n{len(passed)} of {len(supported)} supported files agree to {LIMIT:g} "
        "(largest absolute error, float64)"
    )
    return 0 if supported and len(passed) == len(supported) else 1
