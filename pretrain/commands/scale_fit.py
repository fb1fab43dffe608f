"""`pretrain scale collect`, `fit` and `report`: from a sweep's runs to the fit and its page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.csv_files import check_table_path
from data_pipeline.errors import ConfigError
from data_pipeline.files import write_json
from data_pipeline.progress import StatusLine
from data_pipeline.yaml_files import YAML_SUFFIXES
from pretrain.commands.output_paths import check_output_directory, check_output_file
from pretrain.commands.scale import (
    add_report_output,
    add_runs,
    add_sweep_input,
    swept_runs,
)
from pretrain.scaling.fit import Fit, fit_all
from pretrain.scaling.point_files import Columns, read_points
from pretrain.scaling.points import Points
from pretrain.scaling.summary import fit_lines, fit_tree
from pretrain.scaling.units import units_of
from pretrain.terminal.text import counted, fitted_table

if TYPE_CHECKING:
    from pretrain.scaling.collect import Row

MANY_RUNS = 10_000  # whose fit takes long enough for progress


def fit_of(arguments: argparse.Namespace) -> Fit:
    """Return the fit that the flags of `add_runs` describe. It takes seconds and is not stored."""
    from pretrain.scaling.collect import read_curves

    if not arguments.reach > 1:
        raise ConfigError(f"--reach {arguments.reach} must be above 1: a factor in size")
    points = points_of(arguments)
    training = read_curves(arguments.curves) if arguments.curves else None
    with StatusLine() as status:
        report = status.show if len(points) >= MANY_RUNS else lambda _: None
        return fit_all(points, training=training, reach=arguments.reach, report=report)


def points_of(arguments: argparse.Namespace) -> Points:
    """Return the runs that the flags of `add_runs` describe."""
    if arguments.runs.suffix in YAML_SUFFIXES:
        raise ConfigError(
            f"{arguments.runs} is no table of runs; if it is a sweep, name the runs.csv that "
            f"'pretrain scale collect {arguments.runs}' writes"
        )
    return read_points(
        arguments.runs,
        columns_of(arguments.column),
        where=arguments.where,
        exclude=arguments.exclude,
        holdout=arguments.holdout,
        units=units_of(arguments.unit),
    )


def columns_of(items: list[str]) -> Columns:
    """Column names from items such as `loss=c4`."""
    roles = [field.name for field in fields(Columns)]
    found = {}
    for item in items:
        role, equals, name = item.partition("=")
        if not equals or role not in roles:
            raise ConfigError(
                f"--column {item}: expected ROLE=NAME with one of the roles {', '.join(roles)}"
            )
        found[role] = name
    return Columns(**found)


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale fit`."""
    add_runs(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here, as JSON")


def run_fit(arguments: argparse.Namespace) -> int:
    """Print the fit."""
    check_output_file("--json", arguments.json, "fit.json")
    fit = fit_of(arguments)
    print("\n".join(fit_lines(fit)))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, fit_tree(fit))
        print(f"written: {arguments.json}")
    return 0


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale report`."""
    add_runs(parser)
    add_report_output(parser, None, "Scaling laws", shown="scaling-report beside RUNS")


def run_report(arguments: argparse.Namespace) -> int:
    """Write the report."""
    from pretrain.scaling.report import write_report

    output = arguments.output or arguments.runs.parent / "scaling-report"
    check_output_directory("--output", output)
    fit = fit_of(arguments)
    path = write_report(fit, arguments.runs, output, arguments.title)
    print("\n".join([*fit_lines(fit), f"report: {path}"]))
    return 0


def add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale collect`."""
    add_sweep_input(parser, None, shown="runs.csv in --runs-dir")
    parser.add_argument(
        "--average-last",
        type=int,
        default=1,
        metavar="K",
        help="loss: the mean of the last K evaluations, with its standard error (default 1)",
    )
    parser.add_argument(
        "--curves-out", type=Path, metavar="FILE", help="also write the training curves here"
    )


def run_collect(arguments: argparse.Namespace) -> int:
    """Write the table of runs and, if asked to, their training curves."""
    from pretrain.scaling.collect import row_of, shown_rows, write_curves, write_rows

    _, runs, cells = swept_runs(arguments, "pretrain scale collect")
    output = arguments.output or runs / "runs.csv"
    check_output_file("--output", output, "runs.csv")
    check_output_file("--curves-out", arguments.curves_out, "curves.csv")
    if arguments.average_last < 1:
        raise ConfigError(f"--average-last {arguments.average_last} must be 1 or more")
    rows = [row_of(cell, arguments.average_last) for cell in cells]
    check_table_path(output, [row.name for row in rows])
    write_rows(output, rows)
    left_out = [row for row in rows if row.excluded]
    print(fitted_table(shown_rows(rows)))
    print(f"{output}: {len(rows) - len(left_out)} of {len(rows)} cells have a final loss")
    for row in left_out:
        print(f"left out: {row.name}: {row.excluded}")
    for note in _notes(rows, arguments.average_last):
        print(f"note: {note}")
    if arguments.curves_out:
        count = write_curves(arguments.curves_out, cells)
        print(f"{arguments.curves_out}: {counted(count, 'training curve')}")
    if len(left_out) < len(rows):
        print(f"next: pretrain scale fit {output}, then pretrain scale report {output}")
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
