"""`pretrain scale`: its actions, and the flags and checks that several of them share."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.cli import Program
from foundation.errors import ConfigError, DataError
from pretrain.config.run import RunConfig
from pretrain.scaling.recipe import RULES, Family, Rule, read_ladder, step_law_rule
from pretrain.scaling.sweep_file import Sweep, read_sweep
from pretrain.scaling.which_runs import PlacedCell, cells_directory, cells_of

PROGRAM = Program(
    "pretrain scale",
    "Scaling-law experiments, from the plan to the report.",
    {
        "plan": (
            "pretrain.commands.scale_plan",
            "write a sweep of sizes at budgets, of rates, of lengths, or of variants",
        ),
        "collect": (
            "pretrain.commands.scale_collect",
            "write the runs of a sweep as runs.csv",
        ),
        "fit": (
            "pretrain.commands.scale_fit:fit",
            "fit four laws: the one to rely on, its optimum, and warnings",
        ),
        "predict": (
            "pretrain.commands.scale_predict",
            "predict the optimum and its loss for a budget, a size or a number of tokens",
        ),
        "report": (
            "pretrain.commands.scale_fit:report",
            "write what a table of runs shows as one HTML page: a fit, rates, lengths or variants",
        ),
        "tasks": (
            "pretrain.commands.scale_tasks",
            "predict the accuracy of a task: from size and data to its loss, from that to it",
        ),
        "memory": (
            "pretrain.commands.scale_memory",
            "fit the loss over size, tokens and memory length, and name the memory that pays",
        ),
    },
)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """The flags of every action that fits runs."""
    add = parser.add_argument
    add("runs", type=Path, metavar="RUNS", help="CSV or JSON, one run per row: N, D, loss and more")
    add(
        "--column",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help="name of the column of a role: parameters, tokens, loss, flops, budget, name, "
        "progress, holdout or excluded",
    )
    add("--where", action="append", default=[], metavar="COLUMN=VALUE", help="use only these rows")
    add(
        "--exclude",
        action="append",
        default=[],
        metavar="COLUMN=VALUE: REASON",
        help="leave these rows out, for the reason given",
    )
    unit = "factor of a role's column: parameters=1e6 where N is in millions"
    add("--unit", action="append", default=[], metavar="ROLE=FACTOR", help=unit)
    held = "predict these rows instead of fitting them"
    add("--holdout", action="append", default=[], metavar="COLUMN=VALUE", help=held)


def add_family(parser: argparse._ActionsContainer) -> None:
    """The flags of how a run is derived from the base experiment; `family_of` reads some."""
    add = parser.add_argument
    rules = "rule for learning rate and batch size (default %(default)s)"
    add("--rule", choices=tuple(RULES), default="step-law", help=rules)
    tuned = "rate, and batch if they were tried, from these tables of sweeps of rates"
    add("--tuned", type=Path, nargs="+", default=[], metavar="RUNS", help=tuned)
    layers = "give every size the experiment's number of layers"
    add("--keep-layers", action="store_true", help=layers)
    ladder = "choose from the shapes of these model or experiment files only"
    add("--ladder", type=Path, nargs="+", default=[], metavar="FILE", help=ladder)


def family_of(base: RunConfig, arguments: argparse.Namespace) -> Family:
    """The shapes that the flags of `add_family` allow."""
    rungs = read_ladder(arguments.ladder)
    return Family(base=base, keep_layers=arguments.keep_layers, rungs=rungs)


def rule_of(base: RunConfig, arguments: argparse.Namespace) -> Rule:
    """The rule of rates and batches that the flags of `add_family` name."""
    if arguments.tuned:
        from pretrain.scaling.rates import TunedRule, read_rungs

        return TunedRule(rungs=read_rungs(arguments.tuned), base_width=base.model.base_width)
    rule = RULES[arguments.rule]
    if base.model.base_width and rule is step_law_rule:
        raise ConfigError(
            f"model.base_width={base.model.base_width} makes one learning rate hold at every "
            "width, and the Step Law would lower it once more; use --rule base, or --tuned with a "
            "sweep of that model"
        )
    return rule


def rule_name(arguments: argparse.Namespace) -> str:
    """The rule as notes and files name it."""
    return f"tuned by {', '.join(map(str, arguments.tuned))}" if arguments.tuned else arguments.rule


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """The flags of an action that reads a sweep's runs."""
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP", help="sweep file")
    directory = "parent of the cells' run directories (default runs/SWEEP)"
    add("--runs-dir", type=Path, metavar="DIR", help=directory)


def add_report_output(
    parser: argparse.ArgumentParser, directory: str | None, title: str, shown: str = ""
) -> None:
    """The flags of an action that writes a report; `shown` is a default that depends on others."""
    path = None if directory is None else Path(directory)
    words = f"output directory (default {shown or '%(default)s'})"
    parser.add_argument("--output", type=Path, default=path, metavar="DIR", help=words)
    parser.add_argument("--title", default=title, help="title of the page (default %(default)s)")


def swept_runs(arguments: argparse.Namespace) -> tuple[Sweep, Path, list[PlacedCell]]:
    """The sweep that the flags of `add_sweep` name, the parent of its runs, and its cells there.

    DataError if there is no such directory; ConfigError for a run of other settings.
    """
    sweep = read_sweep(arguments.sweep)
    path = cells_directory(sweep, arguments.runs_dir)
    if not path.is_dir():
        raise DataError(
            f"{path} is not a directory; name the one that contains the sweep's run directories "
            "with --runs-dir, or start the sweep with 'launcher sweep submit'"
        )
    return sweep, path, cells_of(sweep, arguments.sweep, path)
