"""The actions collect, fit and report of `pretrain scale`."""

from __future__ import annotations

import argparse
from dataclasses import fields

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.files import write_json
from pretrain.commands.scale import named_values
from pretrain.scaling.fit import Fit, fit_all
from pretrain.scaling.outputs import refuse_no_directory, refuse_no_file
from pretrain.scaling.point_files import Columns, read_points
from pretrain.scaling.summary import fit_lines, fit_tree
from pretrain.terminal.text import counted

FEWEST_DRAWS = 20


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    return {"collect": _collect, "fit": _fit, "report": _report}[arguments.action](arguments)


def fit_of(arguments: argparse.Namespace) -> Fit:
    """The fit that the command line describes; it takes seconds, so nothing is kept between commands."""
    from pretrain.scaling.collect import read_curves

    if arguments.draws < FEWEST_DRAWS:
        raise ConfigError(
            f"--draws {arguments.draws} is too few for an interval; use at least {FEWEST_DRAWS}"
        )
    if arguments.seed < 0:
        raise ConfigError(f"--seed {arguments.seed} must be 0 or more")
    roles = tuple(field.name for field in fields(Columns))
    columns = Columns(**named_values(arguments.column, roles, "--column"))
    conditions = {
        "where": arguments.where,
        "exclude": arguments.exclude,
        "holdout": arguments.holdout,
    }
    points = read_points(arguments.runs, columns, **conditions)
    training = read_curves(arguments.curves) if arguments.curves else None
    return fit_all(points, training=training, num_draws=arguments.draws, seed=arguments.seed)


def _fit(arguments: argparse.Namespace) -> int:
    refuse_no_file("--json", arguments.json, "fit.json")
    fit = fit_of(arguments)
    print("\n".join(fit_lines(fit)))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, fit_tree(fit))
        print(f"written: {arguments.json}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from pretrain.scaling.report import write_report

    refuse_no_directory("--out", arguments.out)
    path = write_report(fit_of(arguments), arguments.out, arguments.title)
    print(f"report: {path}")
    return 0


def _collect(arguments: argparse.Namespace) -> int:
    from pretrain.scaling.collect import collect_rows, write_curves, write_rows
    from pretrain.scaling.sweep_file import read_sweep

    sweep = read_sweep(arguments.sweep)
    if not arguments.runs_dir.is_dir():
        raise DataError(
            f"{arguments.runs_dir} is no directory; name the one that holds the sweep's run directories"
        )
    refuse_no_file("--out", arguments.out, "runs.csv")
    refuse_no_file("--curves-out", arguments.curves_out, "curves.csv")
    rows = collect_rows(sweep, arguments.runs_dir)
    write_rows(arguments.out, rows)
    left_out = [row for row in rows if row.excluded]
    print(f"{arguments.out}: {len(rows) - len(left_out)} of {len(rows)} cells have a final loss")
    for row in left_out:
        print(f"left out: {row.name}: {row.excluded}")
    versions = {version for row in rows for version in row.code.split()}
    if len(versions) > 1:
        print(
            f"note: {len(versions)} versions of the code trained these cells; column code says which"
        )
    if arguments.curves_out:
        count = write_curves(arguments.curves_out, sweep, arguments.runs_dir)
        print(f"{arguments.curves_out}: {counted(count, 'training curve')}")
    return 0
