"""`pretrain scale collect`: the runs of a sweep as a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.csv_files import check_table_path
from pretrain.commands.output_paths import check_output_file
from pretrain.commands.scale import add_sweep, swept_runs
from pretrain.scaling.collect import rate_checks, row_of, shown_rows, write_rows
from pretrain.terminal.text import fitted_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale collect`."""
    add_sweep(parser)
    words = "table to write (default runs.csv in --runs-dir)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Write the table of runs."""
    sweep, runs, cells = swept_runs(arguments)
    output = arguments.output or runs / "runs.csv"
    check_output_file("--output", output, "runs.csv")
    check_table_path(output)
    rows = list(map(row_of, cells))
    write_rows(output, rows)
    left_out = [row for row in rows if row.excluded]
    print(fitted_table(shown_rows(rows)))
    print(f"{output}: {len(rows) - len(left_out)} of {len(rows)} cells have a final loss")
    for row in left_out:
        if row.rate_factor == "" or row.loss == "":
            print(f"left out: {row.name}: {row.excluded}")
    for line in rate_checks(rows):
        print(line)
    if len(versions := {version for row in rows for version in row.code.split()}) > 1:
        print(f"note: {len(versions)} versions of the code trained these cells; see column code")
    if len(left_out) < len(rows):
        fit = f"pretrain scale fit {output}, then " if sweep.varies == "sizes" else ""
        print(f"next: {fit}pretrain scale report {output}")
    return 0
