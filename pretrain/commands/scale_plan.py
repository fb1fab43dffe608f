"""`pretrain scale plan`: a sweep of sizes at budgets, of rates, of lengths, or of variants.

What a plan varies follows from its flags: --budgets, --rates, or --segments and --memories; a
comparison's file says it itself.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from foundation.cli import add_experiment, check_least
from foundation.errors import ConfigError
from foundation.settings import amount_of, load_config, size_of
from foundation.yaml_files import find_config, read_tree
from pretrain.commands.hardware import add_hardware_arguments, hardware_of
from pretrain.commands.scale import (
    add_family,
    add_sweep_output,
    family_of,
    rule_name,
    rule_of,
    sweep_base,
    sweep_name,
)
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.devices import Hardware
from pretrain.costs.flops import cost_of
from pretrain.scaling.intervals import amount
from pretrain.scaling.placement import (
    Machine,
    Utilization,
    measured_utilization,
    placement_table,
    placement_totals,
)
from pretrain.scaling.plan import (
    TOKENS_PER_PARAMETER,
    PlannedRun,
    check_corpus,
    check_runs,
    make_sweep,
    optimum_at_ratio,
    plan_lengths,
    plan_runs,
    spread_sizes,
    tokens_here,
    write_plan,
)
from pretrain.scaling.predict import noted_repeats
from pretrain.scaling.recipe import (
    Family,
    Rule,
    base_rule,
    outside_step_law,
    replaced_settings,
    step_law_rule,
    with_budget,
)
from pretrain.scaling.sweep_file import Axis, sweep_path
from pretrain.scaling.which_runs import cells_directory, cells_of
from pretrain.terminal.text import counted, fitted_table, flops_text, number

PFLOPS_DAY = 86400e15


# The flags that belong to what a plan varies.
FLAGS: dict[Axis, str] = {
    "sizes": "budgets sizes spread holdout_budgets tokens_per_parameter checks around ratios "
    "max_epochs simulate noise rule tuned lanes_multiple keep_layers width_multiple ladder "
    "cluster nodes gpus_per_node gpu gpu_memory gpu_flops mfu host_memory measured speed seeds",
    "rates": "rates lanes steps seeds",
    "lengths": "segments memories",
    "variants": "runs_dir",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale plan`, by what a plan varies."""
    words = "experiment that is varied, or the file of a comparison of variants"
    add_experiment(parser, words)
    add_sweep_output(parser)
    flags, lengths = amount_of("FLOPs"), size_of("tokens")
    seeds = "train each run once per seed (default: 1, or the experiment's)"
    parser.add_argument("--seeds", type=int, nargs="+", default=[], metavar="SEED", help=seeds)
    group = parser.add_argument_group("sizes: the experiment's family at budgets")
    add = group.add_argument
    words = "training FLOPs per run"
    add("--budgets", type=flags, nargs="+", default=[], metavar="C", help=words)
    add("--sizes", type=int, default=5, help="number of sizes per budget (default %(default)s)")
    ratio = "ratio of each size to the next smaller one (default %(default)s)"
    add("--spread", type=float, default=1.6, help=ratio)
    held = "training FLOPs of runs that will be predicted and not fitted"
    add("--holdout-budgets", type=flags, nargs="+", default=[], metavar="C", help=held)
    center = "D/N around which sizes are centered (default %(default)s)"
    add("--tokens-per-parameter", type=float, default=TOKENS_PER_PARAMETER, help=center)
    around = "center the sizes on the optimum that these runs predict"
    add("--around", type=Path, metavar="RUNS", help=around)
    ratios = "at each budget one size for each of these D/N, instead of --sizes and --spread"
    add("--ratios", type=float, nargs="+", default=[], metavar="D/N", help=ratios)
    epochs = "let cells repeat the corpus up to this often (default 1)"
    add("--max-epochs", type=float, default=1.0, metavar="N", help=epochs)
    checks = "also one size of each budget at half and twice its rate, and one with three seeds"
    add("--checks", action=argparse.BooleanOptionalAction, default=True, help=checks)
    words = "how certain N* and the loss at C FLOPs would be, if a published law held"
    add("--simulate", type=flags, metavar="C", help=words)
    words = "with --simulate: relative standard deviation of a run's loss (default %(default)s)"
    add("--noise", type=float, default=0.005, help=words)
    add_family(group)
    add_machine(parser.add_argument_group("sizes, for a machine: cells are planned to fit it"))
    add = parser.add_argument_group("rates: the experiment at several, equal tokens").add_argument
    rates = "peak learning rates, best 2x apart"
    add("--rates", type=float, nargs="+", default=[], metavar="LR", help=rates)
    lanes = "numbers of lanes, and so batch sizes (default: the experiment's)"
    add("--lanes", type=int, nargs="+", default=[], metavar="N", help=lanes)
    steps = "steps with the experiment's lanes (default: the experiment's)"
    add("--steps", type=int, metavar="N", help=steps)
    group = parser.add_argument_group("lengths: the experiment at equal tokens and equal FLOPs")
    for name, letter in (("segments", "T"), ("memories", "M")):
        words = f"{name[:-1] if letter == 'T' else 'memory'} lengths, in tokens"
        group.add_argument(
            f"--{name}", type=lengths, nargs="+", default=[], metavar=letter, help=words
        )
    group = parser.add_argument_group("variants: planned again when runs have ended, more seeds")
    words = "parent of the cells' run directories (default runs/NAME): where best rates are read"
    group.add_argument("--runs-dir", type=Path, metavar="DIR", help=words)
    parser.set_defaults(get_default=parser.get_default)


def add_machine(group: argparse._ActionsContainer) -> None:
    """The flags of the machine that a plan is for: without one, nothing checks that cells fit."""
    add = group.add_argument
    add_hardware_arguments(group)
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
    plans = {"sizes": _sizes_at_budgets, "variants": _variants}
    return plans.get(_axis_of(arguments), _one_model)(arguments)


def _axis_of(arguments: argparse.Namespace) -> Axis:
    """What the plan varies; ConfigError for nothing, or for flags of something else."""
    file = find_config(arguments.experiment)
    tree = read_tree(file) if file.is_file() else {}
    is_comparison = "members" in tree
    default = arguments.get_default
    given = {name for name, value in vars(arguments).items() if value != default(name)}
    axis: Axis | None = None
    if is_comparison:
        axis = "variants"
    elif "budgets" in given:
        axis = "sizes"
    elif "rates" in given:
        axis = "rates"
    elif given & {"segments", "memories"}:
        axis = "lengths"
    if axis is None:
        raise ConfigError(
            f"{arguments.experiment}: found nothing to vary; give --budgets, --rates, or "
            "--segments and --memories, or the file of a comparison"
        )
    other = {*" ".join(FLAGS.values()).split()} - {*FLAGS[axis].split()}
    if wrong := sorted(given & other):
        raise ConfigError(
            f"--{wrong[0].replace('_', '-')} has no meaning in a plan that varies {axis}; leave it "
            "out, or make two plans"
        )
    return axis


def _one_model(arguments: argparse.Namespace) -> int:
    """The experiment's model at several rates, or with several lengths."""
    if arguments.steps is not None:
        check_least(arguments, 1, "steps")
    varies: Axis = "rates" if arguments.rates else "lengths"
    base, name = sweep_base(arguments, varies)
    resolved = with_vocabulary(base)
    if varies == "rates":
        from pretrain.scaling.rates import plan_rates

        runs = plan_rates(
            resolved,
            arguments.rates,
            lanes=arguments.lanes,
            seeds=arguments.seeds,
            steps=arguments.steps,
        )
        fewer_tokens, fewer_lanes, replaced = "fewer --steps", "smaller --lanes", []
    else:
        runs = plan_lengths(resolved, arguments.segments, arguments.memories)
        fewer_tokens = "an experiment of fewer steps"
        fewer_lanes = "longer --segments, which need fewer lanes"
        replaced = [replaced_settings(base)]
    unchecked = check_corpus(
        base, runs, fewer_tokens=f"use {fewer_tokens} or more text", fewer_lanes=fewer_lanes
    )
    heads = ["cell", "segment", "memory", "lanes", "steps", "rate", "D", "C"]
    rows = [
        [
            item.name,
            *map(str, (item.run.data.segment_length, item.run.model.longest_memory)),
            *map(str, (item.run.data.lanes, item.cost.steps)),
            f"{item.run.optim.learning_rate:.3g}",
            amount(item.cost.tokens),
            flops_text(item.cost.flops),
        ]
        for item in runs
    ]
    total = f"{counted(len(runs), 'run')} of {amount(runs[0].cost.parameters)} parameters, "
    total += f"{sum(item.cost.flops for item in runs):.3g} FLOPs"
    print("\n".join([fitted_table([heads, *rows]), f"total: {total}", *replaced, *unchecked]))
    path = sweep_path(arguments.output, name)
    sweep = make_sweep(name, arguments.experiment, base, runs, path.parent, [total], varies)
    write_plan(path, sweep)
    return 0


def _variants(arguments: argparse.Namespace) -> int:
    """Every member at every rate; again when runs have ended, with the other seeds."""
    from pretrain.scaling.collect import row_of
    from pretrain.scaling.variants import best_rates, member_runs, planned_cells, read_comparison

    comparison = read_comparison(arguments.experiment)
    file = find_config(arguments.experiment.parent / comparison.experiment)
    if not file.exists():
        raise ConfigError(
            f"{arguments.experiment}: {file} does not exist (experiment is relative to the "
            "comparison's file)"
        )
    name = sweep_name(arguments, comparison.name)
    path = sweep_path(arguments.output, name)
    overrides = [*arguments.overrides, *arguments.set]
    runs = member_runs(comparison, file, overrides)
    base = load_config(RunConfig, file, [*comparison.settings, *overrides])
    notes = [f"{flops_text(comparison.flops)} FLOPs for each run of {', '.join(runs)}"]
    cells = list(planned_cells(comparison, runs, {}))
    unchecked = check_corpus(
        base, cells, fewer_tokens="use fewer flops or more text", fewer_lanes="smaller data.lanes"
    )
    sweep = make_sweep(name, file, base, cells, path.parent, notes, "variants")
    folder = cells_directory(sweep, arguments.runs_dir)
    best = best_rates([row_of(cell) for cell in cells_of(sweep, path, folder)])
    cells = list(planned_cells(comparison, runs, best))
    sweep = make_sweep(name, file, base, cells, path.parent, notes, "variants")
    rows = [["member", "parameters", "steps", "tokens", "best rate"]]
    for member, run in runs.items():
        cost = cost_of(run)
        numbers = [amount(cost.parameters), f"{cost.steps:,}", amount(cost.tokens)]
        rows.append([member, *numbers, number(best.get(member), "g")])
    print("\n".join([fitted_table(rows), *notes, *unchecked]))
    is_complete = len(best) == len(runs) or len(comparison.seeds) == 1
    where = f"--runs-dir {arguments.runs_dir} " if arguments.runs_dir else ""
    then = f"pretrain scale measure {path} {where}".rstrip()
    if not is_complete:
        then = "this command again, which adds the other seeds at the best rates"
    write_plan(path, sweep, f"{where}--local (or --cluster FILE)", then)
    return 0


def _sizes_at_budgets(arguments: argparse.Namespace) -> int:
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
    machine, multiple = _machine(family, rule, arguments), arguments.lanes_multiple
    runs = plan_runs(
        family,
        sorted({*arguments.budgets}),
        _sizes(family, optimum, arguments),
        machine.make
        if machine
        else lambda run, budget: (with_budget(run, budget, rule, multiple), {}),
        seeds=list(dict.fromkeys(arguments.seeds)) or [1],
        holdouts={budget: optimum(budget) for budget in arguments.holdout_budgets},
    )
    checks = check_runs(runs) if arguments.checks else []
    runs += checks
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
    if checks:
        part = sum(item.cost.flops for item in checks) / sum(item.cost.flops for item in runs)
        lines.append(
            f"checks: {counted(len(checks), 'run')} of these at other rates and seeds, {part:.0%} "
            "of the FLOPs; 'scale collect' says what they show (--no-checks leaves them out)"
        )
    if machine:
        print(f"\n{fitted_table(placement_table(runs))}\n")
        sizes = [item.cost.parameters for item in runs]
        lines.append(placement_totals(runs, machine.hardware))
        lines.append(machine.hardware.describe())
        lines.append(machine.utilization.describe(sizes))
    if arguments.simulate is not None:
        from pretrain.scaling.simulation import simulated_table

        table = simulated_table(runs, arguments.simulate, arguments.noise)
        words = f"At {arguments.simulate:.3g} FLOPs, if Besiroglu et al. 2024's law held with"
        print(f"\n{words} {arguments.noise:.1%} of noise:\n\n{fitted_table(table)}\n")
    lines += [*_rule_lines(rule, [item.run for item in runs]), *filter(None, [repeated])]
    print("\n".join([*lines, _replaced(family.base, rule), *unchecked]))
    notes = [*_notes(arguments, around), *lines]
    path = sweep_path(arguments.output, name)
    sweep = make_sweep(name, arguments.experiment, base, runs, path.parent, notes)
    if machine:
        write_plan(path, sweep, _where(machine.hardware, arguments.cluster))
    else:
        write_plan(path, sweep)
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
    from pretrain.scaling.rates import TunedRule

    assert isinstance(rule, TunedRule)
    return rule.describe(runs)


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
    from pretrain.scaling.report import choice_line
    from pretrain.scaling.table import read_points

    fit = fit_all(read_points(arguments.around))
    if fit.none_because:
        raise ConfigError(f"--around {arguments.around}: {choice_line(fit)}")
    approach = fit.approaches[0]

    def optimum(flops: float) -> float:
        return float(np.exp(approach.line.log_parameters(np.log(flops))))

    return optimum, f"{approach.title} of {arguments.around.name}"


def _table(runs: list[PlannedRun]) -> list[list[str]]:
    heads = ["cell", "layers", "d_model", "heads", "N", "body", "D", "D/N", "lanes", "steps"]
    rows = [[*heads, "rate", "C", "of budget", "C/6ND"]]
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
