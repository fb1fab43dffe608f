"""`pretrain scale plan | collect | fit | predict | report | context`: scaling-law experiments from plan to report."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from data_pipeline.errors import ConfigError

# action -> module with `run(arguments) -> exit status`, imported when asked for: fits import scipy, reports matplotlib
ACTIONS = {
    "plan": "pretrain.commands.scale_plan",
    "collect": "pretrain.commands.scale_fit",
    "fit": "pretrain.commands.scale_fit",
    "predict": "pretrain.commands.scale_predict",
    "report": "pretrain.commands.scale_fit",
    "context": "pretrain.commands.scale_context",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `pretrain scale`; parse it with `parse_args` (argparse cannot intermix subcommands)."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_plan(
        actions.add_parser(
            "plan", help="sizes around the predicted optimum at each budget, as a sweep file"
        )
    )
    _add_collect(
        actions.add_parser(
            "collect", help="the finished runs of a sweep as runs.csv and curves.csv"
        )
    )
    fit = actions.add_parser(
        "fit", help="approaches 1, 2 and 3 side by side, with intervals and warnings"
    )
    _add_runs(fit)
    fit.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything the fit found here as well"
    )
    _add_predict(
        actions.add_parser(
            "predict", help="optimum and loss at a budget, a size or a number of tokens"
        )
    )
    report = actions.add_parser("report", help="one HTML file and its pictures")
    _add_runs(report)
    _add_report(report, "scaling-report", "Scaling laws")
    _add_context(
        actions.add_parser(
            "context", help="loss against segment and memory length, as a sweep of its own"
        )
    )


def run(arguments: argparse.Namespace) -> int:
    """Run one action; returns its exit status."""
    return importlib.import_module(ACTIONS[arguments.action]).run(arguments)


def named_values(items: list[str], names: tuple[str, ...], option: str) -> dict[str, str]:
    """`["loss=c4"]` -> {"loss": "c4"}; ConfigError for an unknown name."""
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or name not in names:
            raise ConfigError(
                f"{option} {item}: expected NAME=COLUMN with one of the names {', '.join(names)}"
            )
        found[name] = value
    return found


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, metavar="RUNS", help="CSV or JSON, one run per row: N, D, loss and more"
    )
    _add_run_options(parser)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="where a column has another name: parameters, tokens, loss, flops, budget, name, progress, "
        "holdout, excluded",
    )
    parser.add_argument(
        "--where", action="append", default=[], metavar="COLUMN=VALUE", help="use only these rows"
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="COLUMN=VALUE: REASON",
        help="leave rows out",
    )
    parser.add_argument(
        "--holdout", action="append", default=[], metavar="COLUMN=VALUE", help="predict, do not fit"
    )
    parser.add_argument(
        "--curves", type=Path, metavar="FILE", help="training curves (run,N,C,loss) for approach 1"
    )
    parser.add_argument(
        "--draws", type=int, default=1000, help="of the bootstrap (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the bootstrap (default %(default)s)"
    )


def _add_family(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rule",
        choices=("step-law", "base"),
        default="step-law",
        help="of learning rate and batch",
    )
    parser.add_argument(
        "--lanes-multiple", type=int, default=1, metavar="N", help="for N ranks (default 1)"
    )
    parser.add_argument(
        "--keep-layers", action="store_true", help="the experiment's number of layers at every size"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment",
        type=Path,
        metavar="EXPERIMENT",
        help="the run whose family of shapes is scaled",
    )
    parser.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        required=True,
        metavar="C",
        help="training FLOPs per run",
    )
    parser.add_argument("--sizes", type=int, default=5, help="per budget (default %(default)s)")
    parser.add_argument(
        "--spread", type=float, default=1.6, help="from one size to the next (default %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], metavar="SEED", help="one run each (default 1)"
    )
    parser.add_argument(
        "--holdout-budgets",
        type=float,
        nargs="+",
        default=[],
        metavar="C",
        help="predicted, not fitted",
    )
    _add_family(parser)
    parser.add_argument(
        "--tokens-per-parameter",
        type=float,
        default=20.0,
        help="where to centre (default %(default)s)",
    )
    parser.add_argument(
        "--around", type=Path, metavar="RUNS", help="centre on the optimum that these runs predict"
    )
    parser.add_argument(
        "--speed", type=float, default=0.0, metavar="FLOPS", help="FLOPs per second, to print hours"
    )
    _add_sweep_output(parser)


def _add_sweep_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="", help="of the sweep (default: the experiment's)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the sweep file (default configs/sweeps/NAME.yaml)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="override the experiment"
    )


def _add_collect(parser: argparse.ArgumentParser) -> None:
    _add_swept(parser, "runs.csv")
    parser.add_argument(
        "--curves-out", type=Path, metavar="FILE", help="also write the training curves"
    )


def _add_swept(parser: argparse.ArgumentParser, table: str) -> None:
    parser.add_argument("sweep", type=Path, metavar="SWEEP", help="the sweep file")
    parser.add_argument(
        "--runs-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="holds one run directory per cell",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(table), metavar="FILE", help="(default %(default)s)"
    )


def _add_report(parser: argparse.ArgumentParser, directory: str, title: str) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path(directory), metavar="DIR", help="(default %(default)s)"
    )
    parser.add_argument("--title", default=title, help="(default %(default)s)")


def _add_context(parser: argparse.ArgumentParser) -> None:
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    plan = steps.add_parser(
        "plan", help="every segment with every memory, at equal tokens and at equal FLOPs"
    )
    plan.add_argument(
        "experiment",
        type=Path,
        metavar="EXPERIMENT",
        help="its model, tokens and FLOPs are the measure",
    )
    plan.add_argument(
        "--segments",
        type=int,
        nargs="+",
        required=True,
        metavar="T",
        help="segment lengths, in tokens",
    )
    plan.add_argument(
        "--memories",
        type=int,
        nargs="+",
        required=True,
        metavar="M",
        help="memory lengths, in tokens",
    )
    _add_sweep_output(plan)
    collect = steps.add_parser(
        "collect", help="evaluate every run with memories of 0 to 8 times its own"
    )
    _add_swept(collect, "context.csv")
    collect.add_argument(
        "--max-tokens", type=int, default=0, metavar="N", help="to score (default: as the runs do)"
    )
    report = steps.add_parser("report", help="one HTML file and its pictures")
    report.add_argument("table", type=Path, metavar="TABLE", help="what collect wrote")
    _add_report(report, "context-report", "Context lengths")


def _add_predict(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    parser.add_argument(
        "--flops", type=float, default=0.0, metavar="C", help="the optimum at these training FLOPs"
    )
    parser.add_argument(
        "--tokens", type=float, default=0.0, metavar="D", help="the optimum that reads these tokens"
    )
    parser.add_argument(
        "--params", type=float, default=0.0, metavar="N", help="the optimum of this size"
    )
    parser.add_argument(
        "--approach", default="", help="whose optimum is written: parametric, isoflop or envelope"
    )
    parser.add_argument(
        "--experiment", type=Path, metavar="FILE", help="the family of shapes to choose from"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the nearest legal run as an experiment file",
    )
    _add_family(parser)
    parser.add_argument(
        "--force", action="store_true", help="answer even far from the runs that were fitted"
    )
