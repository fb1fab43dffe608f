"""`pretrain scale fit` and `report`: from a table of runs to the fit and its page."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.errors import ConfigError
from foundation.files import write_json
from foundation.progress import StatusLine
from foundation.settings import amount_of
from foundation.yaml_files import YAML_SUFFIXES
from pretrain.commands.output_paths import check_output_directory, check_output_file
from pretrain.commands.scale import add_report_output, add_runs
from pretrain.scaling.fit import Fit, fit_all
from pretrain.scaling.report import fit_lines, fit_tree
from pretrain.scaling.table import Columns, Points, read_points, units_of

MANY_RUNS = 10_000  # whose fit takes long enough for progress


def fit_of(arguments: argparse.Namespace) -> Fit:
    """Return the fit that the flags of `add_runs` describe. It takes seconds and is not stored."""
    points = points_of(arguments)
    with StatusLine() as status:
        report = status.show if len(points) >= MANY_RUNS else lambda _: None
        return fit_all(points, report=report)


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here, as JSON")


def run_fit(arguments: argparse.Namespace) -> int:
    """Print the fit; status 1 if no law describes the runs."""
    check_output_file("--json", arguments.json, "fit.json")
    fit = fit_of(arguments)
    print("\n".join(fit_lines(fit, arguments.flops, arguments.verbose)))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, fit_tree(fit))
        print(f"written: {arguments.json}")
    return int(bool(fit.none_because))


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale report`."""
    add_runs(parser)
    add_report_output(parser, None, "Scaling laws", shown="scaling-report beside RUNS")


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
