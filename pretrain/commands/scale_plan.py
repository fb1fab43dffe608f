"""`pretrain scale plan`: runs around the predicted optimum of each budget, as a sweep file."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data_pipeline.errors import ConfigError
from data_pipeline.program import add_experiment, check_least
from data_pipeline.sizes import amount_of
from pretrain.commands.hardware import add_hardware_arguments, hardware_of
from pretrain.commands.scale import (
    add_family,
    add_sweep_output,
    family_of,
    rule_name,
    rule_of,
    sweep_base,
)
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.devices import Hardware
from pretrain.scaling.family import Family
from pretrain.scaling.intervals import amount
from pretrain.scaling.placement import Machine, placement_table, placement_totals
from pretrain.scaling.plan import (
    TOKENS_PER_PARAMETER,
    Maker,
    PlannedRun,
    check_corpus,
    optimum_at_ratio,
    plan_runs,
    spread_sizes,
    tokens_here,
    write_plan,
)
from pretrain.scaling.recipe import (
    Rule,
    base_rule,
    outside_step_law,
    replaced_settings,
    step_law_rule,
    with_budget,
)
from pretrain.scaling.repeats import noted_repeats
from pretrain.scaling.utilization import Utilization, measured_utilization
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
    ratios = "at each budget one size for each of these D/N, instead of --sizes and --spread"
    add("--ratios", type=float, nargs="+", default=[], metavar="D/N", help=ratios)
    epochs = "let cells repeat the corpus up to this often (default 1)"
    add("--max-epochs", type=float, default=1.0, metavar="N", help=epochs)
    add_machine(parser)
    add_sweep_output(parser)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The flags of the machine that a plan is for: without one, nothing checks that cells fit."""
    add = parser.add_argument
    add_hardware_arguments(parser)
    mfu = "assumed utilization of the peak, as in 'pretrain describe'"
    add("--mfu", type=float, help=mfu)
    host = "host memory of a GPU node, such as 2T bytes; without it only devices are checked"
    add("--host-memory", type=amount_of("bytes"), default=math.inf, metavar="BYTES", help=host)
    measured = "take the utilization of each size from these runs on the same devices"
    add("--measured", type=Path, nargs="+", default=[], metavar="RUN", help=measured)
    speed = "FLOPs per second of the machine, to print hours"
    add("--speed", type=float, default=0.0, metavar="FLOPS", help=speed)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and its cost, and write the sweep file."""
    for budget in (*arguments.budgets, *arguments.holdout_budgets):
        if not 0 < budget < math.inf:
            raise ConfigError(f"a budget of {budget} FLOPs is not positive and finite")
    if not 1 <= arguments.max_epochs < math.inf:
        raise ConfigError(f"--max-epochs {arguments.max_epochs:g} must be 1 or more")
    check_least(arguments, 1, "lanes_multiple")
    base, name = sweep_base(arguments, "scaling")
    family = family_of(with_vocabulary(base), arguments)
    optimum, around = _center(family, arguments)
    rule = rule_of(family.base, arguments)
    machine = _machine(family, rule, arguments)
    runs = plan_runs(
        family,
        sorted({*arguments.budgets}),
        _sizes(family, optimum, arguments),
        machine.make if machine else _budget_only(rule, arguments.lanes_multiple),
        seeds=list(dict.fromkeys(arguments.seeds)),
        holdouts={budget: optimum(budget) for budget in arguments.holdout_budgets},
    )
    unchecked = check_corpus(
        base,
        runs,
        fewer_tokens="use smaller budgets, larger sizes, more text or --max-epochs 4",
        fewer_lanes="a base with fewer lanes or --rule base",
        max_epochs=arguments.max_epochs,
    )
    runs, repeated = noted_repeats(runs, tokens_here(base) or sys.maxsize)
    print(fitted_table(_table(runs)))
    lines = [family.description, _totals(runs, arguments.speed)]
    if machine:
        print(f"\n{fitted_table(placement_table(runs))}\n")
        sizes = [item.cost.parameters for item in runs]
        lines.append(placement_totals(runs, machine.hardware))
        lines.append(machine.utilization.describe(sizes))
    lines += [*_rule_lines(rule, [item.run for item in runs]), *filter(None, [repeated])]
    print("\n".join([*lines, _replaced(family.base, rule), *unchecked]))
    notes = [*_notes(arguments, around), *lines]
    if machine:
        write_plan(arguments, name, base, runs, notes, _where(machine.hardware, arguments.cluster))
    else:
        write_plan(arguments, name, base, runs, notes)
    return 0


def _where(hardware: Hardware, cluster: Path | None) -> str:
    """The flags of 'launcher sweep submit' for this machine."""
    if cluster is None and hardware.nodes == 1:
        return f"--local --ranks {hardware.ranks_per_node}"
    nodes = f"1:{hardware.nodes}" if hardware.nodes > 1 else "1"
    return f"--cluster {cluster or 'FILE'} --nodes {nodes}"


def _notes(arguments: argparse.Namespace, around: str) -> list[str]:
    if arguments.ratios:
        sizes = "D/N of " + ", ".join(f"{ratio:g}" for ratio in arguments.ratios)
        return [sizes, f"rule {rule_name(arguments)}"]
    sizes = f"{counted(arguments.sizes, 'size')} {arguments.spread:g}x apart"
    return [f"centered on {around}, {sizes}", f"rule {rule_name(arguments)}"]


def _rule_lines(rule: Rule, runs: list[RunConfig]) -> list[str]:
    """What the rates and batches rest on."""
    if rule is step_law_rule:
        return [line for line in [outside_step_law(runs)] if line]
    if rule is base_rule:
        return []
    from pretrain.scaling.tuned_rule import TunedRule

    assert isinstance(rule, TunedRule)
    return rule.describe(runs)


def _budget_only(rule: Rule, multiple: int) -> Maker:
    return lambda run, budget: (with_budget(run, budget, rule, multiple), {})


def _machine(family: Family, rule: Rule, arguments: argparse.Namespace) -> Machine | None:
    """The machine that the flags name; None without any. ConfigError for half of one."""
    named = (arguments.cluster, arguments.gpu, arguments.gpus_per_node)
    if all(each is None for each in named):
        if arguments.nodes != "1" or arguments.mfu is not None or arguments.measured:
            raise ConfigError(
                "--nodes, --mfu and --measured need a machine: add --cluster FILE, or --gpu H100 "
                "--gpus 8"
            )
        return None
    hardware = hardware_of(arguments)
    assumed = hardware.assumed_mfu(arguments.mfu)
    utilization = Utilization(assumed)
    if arguments.measured:
        utilization = measured_utilization(arguments.measured, hardware, assumed)
    return Machine(
        hardware=hardware,
        utilization=utilization,
        family=family,
        rule=rule,
        lanes_multiple=arguments.lanes_multiple,
        host_memory=arguments.host_memory,
    )


def _sizes(
    family: Family, optimum: Callable[[float], float], arguments: argparse.Namespace
) -> Callable[[float], list[float]]:
    if not arguments.ratios:
        return spread_sizes(optimum, arguments.sizes, arguments.spread)
    if min(arguments.ratios) <= 0:
        raise ConfigError("--ratios must be positive")
    at_ratio = [optimum_at_ratio(family, ratio) for ratio in sorted(arguments.ratios, reverse=True)]
    return lambda budget: [each(budget) for each in at_ratio]


def _replaced(base: RunConfig, rule: Rule) -> str:
    """What every run has in place of the base's settings, besides its size and steps."""
    changes = [replaced_settings(base), "no evaluation before the end"]
    if rule is step_law_rule:
        changes.append("learning rate and lanes of the Step Law; --rule base keeps those")
    return ", ".join(changes)


def _center(family: Family, arguments: argparse.Namespace) -> tuple[Callable[[float], float], str]:
    """Return the predicted optimal parameters as a function of FLOPs, and their source."""
    if not arguments.around:
        ratio = arguments.tokens_per_parameter
        if ratio <= 0:
            raise ConfigError(f"--tokens-per-parameter {ratio} must be positive")
        return optimum_at_ratio(family, ratio), f"{ratio:g} tokens per parameter"
    from pretrain.scaling.fit import fit_all
    from pretrain.scaling.point_files import read_points
    from pretrain.scaling.predict import preferred

    fit = fit_all(read_points(arguments.around))
    approach = preferred(fit)

    def optimum(flops: float) -> float:
        return float(np.exp(approach.line.log_parameters(np.log(flops))))

    reason = fit.ranking.reason
    return optimum, f"approach {approach.title} of {arguments.around.name} ({reason})"


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
