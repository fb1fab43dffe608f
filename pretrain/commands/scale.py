"""`pretrain scale`: its actions, and the flags and checks that several of them share."""

import argparse
from pathlib import Path

from foundation.cli import Program, targets
from foundation.errors import ConfigError
from foundation.sizes import amount_of
from pretrain.config.run import RunConfig
from pretrain.scaling.recipe import RULES, Rule, step_law_rule

LARGEST = 1e40  # of FLOPs, parameters and tokens that are asked for

ONE_EACH = {
    "plan": "write a sweep of sizes at budgets, of rates, of lengths, or of variants",
    "memory": "fit the loss over size, tokens and memory length, and name the memory that pays",
}
OF_A_TABLE = {
    "collect": "write the runs of a sweep as runs.csv",
    "fit": "fit four laws: the one to rely on, its optimum at a budget, or the loss of one run",
    "report": "write what a table of runs, or a folder of forecast cards, shows as a page",
}
CARDS = {
    "forecast": "write what is predicted of a run, before it starts, as a card",
    "grade": "compare a finished run with its forecast",
}
PROGRAM = Program(
    "pretrain scale",
    "Scaling-law experiments, from the plan to the report.",
    targets("pretrain.commands.scale_", ONE_EACH)
    | targets("pretrain.commands.scale_fit:", OF_A_TABLE)
    | targets("pretrain.commands.scale_forecast:", CARDS),
)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Define the flags of every action that fits runs."""
    add = parser.add_argument
    add("runs", type=Path, metavar="RUNS", help="CSV or JSON, one run per row: N, D, loss and more")
    add("--column", action="append", default=[], metavar="ROLE=NAME", help="parameters=size ...")


def add_question(parser: argparse.ArgumentParser) -> None:
    """Define the flags of a question: the optimum of a budget, or one run."""
    add = parser.add_argument
    add("--flops", type=amount_of("flops"), metavar="C", help="the best run of these FLOPs")
    add("--params", type=amount_of("params"), metavar="N", help="of a run, with --tokens")
    add("--tokens", type=amount_of("tokens"), metavar="D", help="of a run, with --params")
    add("--force", action="store_true", help="predict even far from the fitted runs")


def check_question(arguments: argparse.Namespace) -> list[str]:
    """Which flags of `add_question` are given; ConfigError unless they ask for a budget, for one
    run or for nothing.
    """
    asked = {name: getattr(arguments, name) for name in ("flops", "params", "tokens")}
    given = [name for name, value in asked.items() if value is not None]
    for name in given:
        check_amount(name, asked[name])
    if given not in ([], ["flops"], ["params", "tokens"]):
        raise ConfigError("give --flops, or --params and --tokens together, not all")
    if arguments.law and "params" in given:
        raise ConfigError("--law has no effect with --params and --tokens: leave it out")
    return given


def check_amount(name: str, value: float) -> None:
    """Raise ConfigError for a flag whose number is not positive and finite."""
    if not 0 < value <= LARGEST:
        raise ConfigError(f"--{name} {value:g}: give a positive number of at most {LARGEST:g}")


def add_family(parser: argparse._ActionsContainer) -> None:
    """Define the flags of how a run is derived from the base experiment."""
    add = parser.add_argument
    add("--rule", choices=tuple(RULES), default="step-law", help="of rate and batch")
    add("--tuned", type=Path, nargs="+", default=[], metavar="RUNS", help="tables of tuned rates")
    add("--keep-layers", action="store_true", help="all sizes have the experiment's depth")


def rule_of(base: RunConfig, arguments: argparse.Namespace) -> Rule:
    """The rule of rates and batches that the flags of `add_family` name."""
    if arguments.tuned:
        from pretrain.scaling.learning_rate import TunedRule, read_rungs

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
