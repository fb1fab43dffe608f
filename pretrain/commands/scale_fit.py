"""`pretrain scale collect`, `fit` and `report`: from runs to their table, its fit and its page."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.cli import Answer, add_json
from foundation.csv_files import check_table_path
from foundation.errors import ConfigError, DataError
from foundation.settings import amount_of
from foundation.yaml_files import YAML_SUFFIXES
from pretrain.commands.output_paths import check_output_directory, check_output_file
from pretrain.commands.scale import add_runs, check_amount
from pretrain.scaling.collect import rate_checks, row_of, shown_rows, write_rows
from pretrain.scaling.fit import Fit, fit_all
from pretrain.scaling.report import fit_lines, fit_tree
from pretrain.scaling.sweep_file import read_sweep
from pretrain.scaling.table import Columns, Points, read_points, units_of
from pretrain.scaling.which_runs import cells_directory, cells_of
from pretrain.terminal.text import fitted_table


def add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale collect`."""
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP", help="sweep file")
    directory = "parent of the cells' run directories (default runs/SWEEP)"
    add("--runs-dir", type=Path, metavar="DIR", help=directory)
    words = "table to write (default runs.csv in --runs-dir)"
    add("--output", type=Path, metavar="FILE", help=words)


def run_collect(arguments: argparse.Namespace) -> int:
    """Write the table of runs."""
    sweep = read_sweep(arguments.sweep)
    runs = cells_directory(sweep, arguments.runs_dir)
    if not runs.is_dir():
        raise DataError(
            f"{runs} is not a directory; name the one that contains the sweep's run directories "
            "with --runs-dir, or start the sweep with 'launcher sweep submit'"
        )
    output = arguments.output or runs / "runs.csv"
    check_output_file("--output", output, "runs.csv")
    check_table_path(output)
    rows = list(map(row_of, cells_of(sweep, arguments.sweep, runs)))
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


def fit_of(arguments: argparse.Namespace) -> Fit:
    """Return the fit that the flags of `add_runs` describe. It takes seconds and is not stored."""
    return fit_all(points_of(arguments))


def points_of(arguments: argparse.Namespace) -> Points:
    """Return the runs that the flags of `add_runs` describe."""
    if arguments.runs.suffix in YAML_SUFFIXES:
        raise ConfigError(
            f"{arguments.runs} is no table of runs; if it is a sweep, name the runs.csv that "
            f"'pretrain scale collect {arguments.runs}' writes"
        )
    return read_points(
        arguments.runs,
        Columns.parse(arguments.column),
        where=arguments.where,
        exclude=arguments.exclude,
        holdout=arguments.holdout,
        units=units_of(arguments.unit),
    )


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale fit`."""
    add_runs(parser)
    flops = "show the optimum of this many training FLOPs (default: 10 times the largest budget)"
    parser.add_argument("--flops", type=amount_of("FLOPs"), default=0.0, metavar="C", help=flops)
    parser.add_argument("--verbose", action="store_true", help="print all there is")
    add_json(parser)


def run_fit(arguments: argparse.Namespace) -> Answer:
    """Return the fit; status 1 if no law describes the runs."""
    check_amount("flops", arguments.flops)
    fit = fit_of(arguments)
    text = "\n".join(fit_lines(fit, arguments.flops, arguments.verbose))
    return Answer(text, fit_tree(fit, arguments.flops), int(bool(fit.none_because)))


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale report`."""
    add_runs(parser)
    words = "output directory (default scaling-report beside RUNS)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=words)
    words = "title of the page (default %(default)s)"
    parser.add_argument("--title", default="Scaling laws", help=words)


def run_report(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from pretrain.scaling.comparison_pages import rows_of_comparison, write_comparison
    from pretrain.scaling.report import write_report

    output = arguments.output or arguments.runs.parent / "scaling-report"
    check_output_directory("--output", output)
    if arguments.runs.suffix == ".csv" and (rows := rows_of_comparison(arguments.runs)):
        print(write_comparison(rows, arguments.runs, output, arguments.title))
        return 0
    fit = fit_of(arguments)
    path = write_report(fit, arguments.runs, output, arguments.title)
    print("\n".join([*fit_lines(fit), f"report: {path}"]))
    return 0
