"""`pretrain scale plan`: runs around the predicted optimum of each budget, as a sweep file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_pipeline.errors import ConfigError
from data_pipeline.program import add_experiment
from data_pipeline.sizes import amount_of
from pretrain.commands.scale import add_family, add_sweep_output, sweep_base
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.scaling.intervals import amount
from pretrain.scaling.plan import (
    TOKENS_PER_PARAMETER,
    PlannedRun,
    check_corpus,
    optimum_at_ratio,
    plan_runs,
    write_plan,
)
from pretrain.scaling.recipe import Rule, replaced_settings
from pretrain.terminal.text import counted, fitted_table, flops_text

PFLOPS_DAY = 86400e15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale plan`."""
    add = parser.add_argument
    base = "base experiment, whose family of shapes is scaled"
    add_experiment(parser, RunConfig, base)
    flops = "training FLOPs per run"
    add("--budgets", type=amount_of("FLOPs"), nargs="+", required=True, metavar="C", help=flops)
    add("--sizes", type=int, default=5, help="number of sizes per budget (default %(default)s)")
    ratio = "ratio of each size to the next smaller one (default %(default)s)"
    add("--spread", type=float, default=1.6, help=ratio)
    seeds = "train each run once per seed (default 1)"
    add("--seeds", type=int, nargs="+", default=[1], metavar="SEED", help=seeds)
    held = "training FLOPs of runs that will be predicted and not fitted"
    add("--holdout-budgets", type=amount_of("FLOPs"), nargs="+", default=[], metavar="C", help=held)
    add_family(parser)
    center = "D/N around which sizes are centered (default %(default)s)"
    add("--tokens-per-parameter", type=float, default=TOKENS_PER_PARAMETER, help=center)
    around = "center the sizes on the optimum that these runs predict"
    add("--around", type=Path, metavar="RUNS", help=around)
    speed = "FLOPs per second of the machine, to print hours"
    add("--speed", type=float, default=0.0, metavar="FLOPS", help=speed)
    add_sweep_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and its cost, and write the sweep file."""
    for budget in (*arguments.budgets, *arguments.holdout_budgets):
        if not 0 < budget < math.inf:
            raise ConfigError(f"a budget of {budget} FLOPs is not positive and finite")
    base, name = sweep_base(arguments, "scaling")
    known = with_vocabulary(base)
    optimum, around = _center(known, arguments)
    runs = plan_runs(
        known,
        sorted(arguments.budgets),
        optimum,
        num_sizes=arguments.sizes,
        spread=arguments.spread,
        rule=arguments.rule,
        seeds=arguments.seeds,
        holdouts=arguments.holdout_budgets,
        lanes_multiple=arguments.lanes_multiple,
        keep_layers=arguments.keep_layers,
    )
    unchecked = check_corpus(
        base,
        runs,
        fewer_tokens="use smaller budgets, larger sizes or more text",
        fewer_lanes="a base with fewer lanes or --rule base",
    )
    print(fitted_table(_table(runs)))
    totals = _totals(runs, arguments.speed)
    print("\n".join([totals, _replaced(known, arguments.rule), *unchecked]))
    sizes = f"{counted(arguments.sizes, 'size')} {arguments.spread:g}x apart"
    notes = [f"centered on {around}, {sizes}", f"rule {arguments.rule}", totals]
    write_plan(arguments, name, base, runs, notes)
    return 0


def _replaced(base: RunConfig, rule: Rule) -> str:
    """What every run has in place of the base's settings, besides its size and steps."""
    changes = [replaced_settings(base), "no evaluation before the end"]
    if rule == "step-law":
        changes.append("learning rate and lanes of the Step Law; --rule base keeps those")
    return ", ".join(changes)


def _center(base: RunConfig, arguments: argparse.Namespace) -> tuple[Callable[[float], float], str]:
    """Return the predicted optimal parameters as a function of FLOPs, and their source."""
    if not arguments.around:
        ratio = arguments.tokens_per_parameter
        if ratio <= 0:
            raise ConfigError(f"--tokens-per-parameter {ratio} must be positive")
        return optimum_at_ratio(
            base, ratio, arguments.keep_layers
        ), f"{ratio:g} tokens per parameter"
    from pretrain.scaling.fit import fit_all
    from pretrain.scaling.point_files import read_points
    from pretrain.scaling.predict import preferred

    approach = preferred(fit_all(read_points(arguments.around), num_draws=50))

    def optimum(flops: float) -> float:
        return float(np.exp(approach.line.log_parameters(np.log(flops))))

    return optimum, f"approach {approach.title} of {arguments.around.name}"


def _table(runs: list[PlannedRun]) -> list[list[str]]:
    heads = [
        "cell",
        "layers",
        "d_model",
        "heads",
        "N",
        "body",
        "D",
        "D/N",
        "lanes",
        "steps",
        "rate",
        "C",
    ]
    heads += ["of budget", "C/6ND"]
    rows = [heads]
    for item in runs:
        model, cost = item.run.model, item.cost
        rows.append(
            [
                item.name,
                *(str(value) for value in (model.num_layers, model.d_model, model.num_heads)),
                *(amount(value) for value in (cost.parameters, cost.body_parameters, cost.tokens)),
                f"{cost.tokens / cost.parameters:.1f}",
                *(str(value) for value in (item.run.data.lanes, cost.steps)),
                f"{item.run.optim.learning_rate:.2e}",
                flops_text(cost.flops),
                f"{cost.flops / item.facts['budget'] - 1:+.2%}",
                f"{cost.flops / (6 * cost.parameters * cost.tokens):.2f}",
            ]
        )
    return rows


def _totals(runs: list[PlannedRun], speed: float) -> str:
    flops, tokens = sum(item.cost.flops for item in runs), sum(item.cost.tokens for item in runs)
    days = f"{flops:.3g} FLOPs ({flops / PFLOPS_DAY:.3g} PFLOP/s-days)"
    text = f"total: {counted(len(runs), 'run')}, {days}, {amount(tokens)} tokens"
    return (
        f"{text}, {flops / speed / 3600:.3g} hours at {speed:.3g} FLOPs per second"
        if speed > 0
        else text
    )
