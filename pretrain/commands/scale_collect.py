"""`pretrain scale collect`: the runs of a sweep as a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from foundation.csv_files import check_table_path
from foundation.errors import ConfigError
from pretrain.commands.output_paths import check_output_file
from pretrain.commands.scale import add_sweep, swept_runs
from pretrain.scaling.collect import Row, rate_checks, row_of, shown_rows, write_rows
from pretrain.terminal.text import counted, fitted_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale collect`."""
    add_sweep(parser)
    words = "table to write (default runs.csv in --runs-dir)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=words)
    parser.add_argument(
        "--average-last",
        type=int,
        default=1,
        metavar="K",
        help="loss: the mean of the last K evaluations, with its standard error (default 1)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the table of runs."""
    sweep, runs, cells = swept_runs(arguments)
    output = arguments.output or runs / "runs.csv"
    check_output_file("--output", output, "runs.csv")
    if arguments.average_last < 1:
        raise ConfigError(f"--average-last {arguments.average_last} must be 1 or more")
    rows = [row_of(cell, arguments.average_last) for cell in cells]
    check_table_path(output)
    write_rows(output, rows)
    left_out = [row for row in rows if row.excluded]
    print(fitted_table(shown_rows(rows)))
    print(f"{output}: {len(rows) - len(left_out)} of {len(rows)} cells have a final loss")
    for row in left_out:
        if row.rate_factor == "" or row.loss == "":
            print(f"left out: {row.name}: {row.excluded}")
    for line in rate_checks(rows):
        print(line)
    for note in _notes(rows, arguments.average_last):
        print(f"note: {note}")
    if len(left_out) < len(rows):
        then = f"pretrain scale report {output}"
        fits = sweep.varies == "sizes"
        print(f"next: pretrain scale fit {output}, then {then}" if fits else f"next: {then}")
    return 0


def _notes(rows: Sequence[Row], average_last: int) -> list[str]:
    """What a reader of the table should know of its cells."""
    notes = []
    versions = {version for row in rows for version in row.code.split()}
    if len(versions) > 1:
        notes.append(f"{len(versions)} versions of the code trained these cells; see column code")
    single = [row.name for row in rows if not row.excluded and row.loss_error == ""]
    if average_last > 1 and single:
        notes.append(
            f"nothing to average in {counted(len(single), 'cell')} with one evaluation, such as "
            f"{single[0]}: 'scale plan' plans one, at the end (evaluation.interval=0)"
        )
    return notes
