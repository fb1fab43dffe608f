"""The action plan of `pretrain scale`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.scaling.outputs import refuse_no_file
from pretrain.scaling.plan import PlannedRun, optimum_at_ratio, plan_runs
from pretrain.scaling.planned import check_tokens, sweep_path, write_plan
from pretrain.scaling.wording import amount
from pretrain.terminal.text import counted, text_table

PFLOPS_DAY = 86400e15


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and its cost, and write the sweep file."""
    for budget in (*arguments.budgets, *arguments.holdout_budgets):
        if not 0 < budget < math.inf:
            raise ConfigError(f"a budget of {budget} FLOPs is no positive number")
    base = load_config(RunConfig, arguments.experiment, arguments.set)
    name = arguments.name or f"{base.name}-scaling"
    refuse_no_file("--out", sweep_path(arguments, name), f"{name}.yaml")
    known = with_vocabulary(base)
    optimum, around = _centre(known, arguments)
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
    unchecked = check_tokens(base, runs)
    print(text_table(_table(runs)))
    totals = _totals(runs, arguments.speed)
    print("\n".join([totals, *unchecked]))
    sizes = f"{counted(arguments.sizes, 'size')} {arguments.spread:g}x apart"
    notes = [f"centred on {around}, {sizes}", f"rule {arguments.rule}", totals]
    write_plan(arguments, name, base, runs, notes)
    return 0


def _centre(base: RunConfig, arguments: argparse.Namespace) -> tuple[Callable[[float], float], str]:
    """Predicted optimal parameters at given FLOPs, and where the prediction comes from."""
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
        "of budget",
        "C/6ND",
    ]
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
                f"{cost.flops:.3e}",
                f"{cost.flops / item.budget - 1:+.2%}",
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
