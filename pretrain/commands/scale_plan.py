"""`pretrain scale plan`: a sweep of sizes at budgets, of rates, of lengths, or of variants.

What a plan varies follows from its flags: --budgets, --rates, or --segments and --memories; a
comparison's file says it itself.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from foundation.cli import Answer, add_experiment, add_json
from foundation.errors import ConfigError
from foundation.settings import load_config
from foundation.sizes import amount_of, size_of
from foundation.yaml_files import find_config, read_tree
from pretrain.commands.hardware import add_hardware_arguments, hardware_of
from pretrain.commands.scale import add_family, check_amount, rule_name, rule_of
from pretrain.comparisons.comparison import plan_members, read_comparison
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import checkpoint_bytes
from pretrain.costs.flops import computed_step_flops
from pretrain.costs.hardware import GIB, Hardware
from pretrain.scaling.intervals import amount
from pretrain.scaling.law import FEWEST_GROUPS
from pretrain.scaling.learning_rate import FEWEST_RATES, TunedRule
from pretrain.scaling.machine import Machine, placement, placement_totals
from pretrain.scaling.plan import (
    TOKENS_PER_PARAMETER,
    PlannedRun,
    as_trunks,
    at_computed_flops,
    axis,
    check_corpus,
    check_runs,
    corpus_of,
    length_axes,
    make_sweep,
    optimum_at_ratio,
    plan_sizes,
    planned_run,
    spread_sizes,
    trunk_sizes,
    varied,
)
from pretrain.scaling.recipe import (
    Family,
    Rule,
    outside_step_law,
    step_law_rule,
    with_budget,
    with_steps,
)
from pretrain.scaling.simulation import simulated_table
from pretrain.sweeps.sweep_file import Kind, check_sweep_output, sweep_path, write_sweep
from pretrain.terminal.text import counted, fitted_table, flops_text

PFLOPS_DAY = 86400e15
ANYWHERE = "--local (or --cluster FILE)"

# The flags that belong to what a plan varies.
FLAGS: dict[Kind, str] = {
    "sizes": "budgets sizes spread holdout_budgets tokens_per_parameter checks "
    "trunks simulate noise rule tuned keep_layers cluster nodes gpus_per_node "
    "gpu gpu_memory gpu_flops mfu seeds",
    "rates": "rates seeds",
    "lengths": "segments memories seeds",
    "variants": "flops seeds",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain scale plan`, by what a plan varies."""
    flops, tokens, some = amount_of("FLOPs"), size_of("tokens"), {"nargs": "+", "default": []}
    add_experiment(parser, "experiment that is varied, or the file of a comparison of variants")
    add = parser.add_argument
    add("--name", default="", help="of the sweep (default: by --output or the experiment)")
    add("--output", type=Path, metavar="FILE", help="default: configs/sweeps/NAME.yaml")
    add("--seeds", type=int, **some, metavar="SEED", help="train each run once per seed")
    group = parser.add_argument_group("sizes: the experiment's family at budgets")
    add = group.add_argument
    add("--budgets", type=flops, **some, metavar="C", help="training FLOPs per run")
    add("--sizes", type=int, default=5, help="number of sizes per budget (default %(default)s)")
    add("--spread", type=float, default=1.6, help="ratio between sizes (default %(default)s)")
    add("--holdout-budgets", type=flops, **some, metavar="C", help="of runs that are not fitted")
    ratio = TOKENS_PER_PARAMETER
    add("--tokens-per-parameter", type=float, default=ratio, help="center (default %(default)s)")
    yes_or_no = argparse.BooleanOptionalAction
    add("--checks", action=yes_or_no, default=True, help="also runs at other rates and seeds")
    add("--trunks", action="store_true", help="longer runs continue shorter ones (schedule wsd)")
    add("--simulate", type=flops, metavar="C", help="how certain answers at C FLOPs would be")
    add("--noise", type=float, default=0.005, help="of a simulated loss (default %(default)s)")
    add_family(group)
    group = parser.add_argument_group("sizes, for a machine: cells are planned to fit it")
    add_hardware_arguments(group)
    group.add_argument("--mfu", type=float, help="assumed utilization of the peak")
    add = parser.add_argument_group("rates: the experiment at several, equal tokens").add_argument
    add("--rates", type=float, **some, metavar="LR", help="peak rates, best 2x apart")
    group = parser.add_argument_group("lengths: the experiment at equal tokens and equal FLOPs")
    group.add_argument("--segments", type=tokens, **some, metavar="T", help="tokens of a segment")
    group.add_argument("--memories", type=tokens, **some, metavar="M", help="tokens of memory")
    add = parser.add_argument_group("variants: a comparison's file").add_argument
    add(
        "--flops", type=flops, metavar="C", help="training FLOPs of every run (default: the file's)"
    )
    parser.set_defaults(get_default=parser.get_default)
    add_json(parser)


def run(arguments: argparse.Namespace) -> Answer:
    """Return the plan and its cost, and write the sweep file."""
    kind = _kind_of(arguments)
    file, overrides, name = arguments.experiment, arguments.overrides, ""
    comparison = None
    if kind == "variants":
        comparison = read_comparison(file, overrides)
        own = {name: getattr(arguments, name) for name in ("flops", "seeds")}
        given = {name: value for name, value in own.items() if value}
        comparison = replace(comparison, **given)
        file, overrides = find_config(comparison.experiment), comparison.settings
        name = comparison.name
        if not file.exists():
            raise ConfigError(
                f"{arguments.experiment}: {file} does not exist (experiment is relative to the "
                "comparison's file)"
            )
    base = load_config(RunConfig, file, overrides)
    name = name or f"{base.name}-{'scaling' if kind == 'sizes' else kind}"
    name = arguments.name or (arguments.output.stem if arguments.output else name)
    path = sweep_path(arguments.output, name)
    check_sweep_output(path, name)
    notes, where = [], ANYWHERE
    if kind == "sizes":
        runs, notes, where = _sizes_at_budgets(base, arguments)
    elif comparison is not None:
        runs = plan_members(comparison, file)
    else:
        runs = _of_one_model(kind, with_vocabulary(base), arguments)
    unchecked = []
    if (corpus := corpus_of(runs[0].run)) is None:
        unchecked = [f"note: no corpus at {base.data.path}, so nothing checks that it is enough"]
    else:
        check_corpus(corpus, runs)
    lines = [fitted_table(_table(runs))]
    if arguments.simulate is not None:
        table = simulated_table(runs, arguments.simulate, arguments.noise)
        words = f"At {arguments.simulate:.3g} FLOPs, if Besiroglu et al. 2024's law held with"
        lines.append(f"\n{words} {arguments.noise:.1%} of noise:\n\n{fitted_table(table)}\n")
    notes = [*_totals(runs), *notes]
    lines += [*notes, *unchecked]
    write_sweep(path, make_sweep(name, file, base, runs, path.parent, notes, kind))
    lines.append(
        "cells are evaluated at their end and keep their last checkpoint: evaluation.interval=0, "
        "checkpoint.keep_last=1"
    )
    lines.append(f"sweep: {path} ({counted(len(runs), 'cell')})")
    lines.append(f"next: launcher sweep submit {path} {where}, then pretrain scale collect {path}")
    cells = [{"name": item.name, **vars(item.cost), **item.facts} for item in runs]
    return Answer("\n".join(lines), {"sweep": path, "cells": cells})


def _kind_of(arguments: argparse.Namespace) -> Kind:
    """What the plan varies; ConfigError for nothing, or for flags of something else."""
    file = find_config(arguments.experiment)
    tree = read_tree(file) if file.is_file() else {}
    default = arguments.get_default
    given = {name for name, value in vars(arguments).items() if value != default(name)}
    kinds: dict[Kind, bool] = {
        "variants": "members" in tree,
        "sizes": "budgets" in given,
        "rates": "rates" in given,
        "lengths": bool(given & {"segments", "memories"}),
    }
    kind: Kind | None = next((kind for kind, is_it in kinds.items() if is_it), None)
    if kind is None:
        raise ConfigError(
            f"{arguments.experiment}: found nothing to vary; give --budgets, --rates, or "
            "--segments and --memories, or the file of a comparison"
        )
    other = {*" ".join(FLAGS.values()).split()} - {*FLAGS[kind].split()}
    if wrong := sorted(given & other):
        raise ConfigError(
            f"--{wrong[0].replace('_', '-')} has no meaning in a plan that varies {kind}; leave it "
            "out, or make two plans"
        )
    return kind


def _of_one_model(kind: Kind, base: RunConfig, arguments: argparse.Namespace) -> list[PlannedRun]:
    """The experiment's model at several rates, or with several lengths."""
    rates, steps = arguments.rates, base.optim.steps
    seeds = axis("s", "seed", arguments.seeds or [base.seed])
    file, overrides = arguments.experiment, arguments.overrides
    if kind == "rates":
        if len({*rates}) < FEWEST_RATES or not all(0 < rate < math.inf for rate in rates):
            raise ConfigError(
                f"--rates {' '.join(f'{rate:g}' for rate in rates)}: expected at least "
                f"{FEWEST_RATES} different positive rates, such as 5e-4 1e-3 2e-3 4e-3"
            )
        axes = [axis("lr", "optim.learning_rate", rates), seeds]
        return [planned_run(with_steps(run, steps)) for run in varied(file, overrides, axes)]
    segments = arguments.segments or [base.data.segment_length]
    memories = arguments.memories or [base.model.longest_memory]
    flops = computed_step_flops(base, 1) * steps
    made = []
    for run in varied(file, overrides, [*length_axes(base, segments, memories), seeds]):
        same = {"tokens": with_steps(run, steps), "flops": at_computed_flops(run, flops)}
        if same["tokens"] == same["flops"]:
            made.append(same["tokens"])
        else:
            made += [replace(run, name=f"{run.name}-same-{kept}") for kept, run in same.items()]
    return list(map(planned_run, made))


def _sizes_at_budgets(
    base: RunConfig, arguments: argparse.Namespace
) -> tuple[list[PlannedRun], list[str], str]:
    """Return the runs, notes on them, and the flags of 'launcher sweep submit' for them."""
    for name in ("budgets", "holdout-budgets"):
        for budget in getattr(arguments, name.replace("-", "_")):
            check_amount(name, budget)
    check_amount("tokens-per-parameter", ratio := arguments.tokens_per_parameter)
    family = Family(base=with_vocabulary(base), keep_layers=arguments.keep_layers)
    optimum = optimum_at_ratio(family, ratio)
    rule, machine, where = rule_of(family.base, arguments), None, ANYWHERE
    if any(getattr(arguments, name) is not None for name in ("cluster", "gpu", "gpus_per_node")):
        hardware = hardware_of(arguments)
        mfu = hardware.assumed_mfu(arguments.mfu)
        machine = Machine(hardware=hardware, mfu=mfu, rule=rule)
        where = _where(hardware, arguments.cluster)
    elif arguments.nodes != "1" or arguments.mfu is not None:
        raise ConfigError(
            "--nodes and --mfu need a machine: add --cluster FILE, or --gpu H100 --gpus 8"
        )
    sizes = spread_sizes(optimum, arguments.sizes, arguments.spread)
    if arguments.trunks:
        sizes = trunk_sizes(sizes, arguments.budgets, arguments.spread)
    runs = plan_sizes(
        family,
        sorted({*arguments.budgets}),
        sizes,
        machine.make if machine else lambda run, budget: (with_budget(run, budget, rule), {}),
        seeds=list(dict.fromkeys(arguments.seeds)) or [1],
        holdouts={budget: optimum(budget) for budget in arguments.holdout_budgets},
    )
    notes = [
        f"centered on {ratio:g} tokens per parameter, {counted(arguments.sizes, 'size')} "
        f"{arguments.spread:g}x apart, rule {rule_name(arguments)}",
        family.description,
    ]
    if arguments.trunks:
        checkpoint, metrics = base.checkpoint, base.metrics
        if checkpoint.local or checkpoint.mirror or metrics.wandb_project:
            raise ConfigError(
                "--trunks makes runs of one shape share a run's identity; leave out "
                "checkpoint.local, checkpoint.mirror and metrics.wandb_project"
            )
        runs, saved = as_trunks(runs)
        notes.append(saved)
    checks = check_runs(runs) if arguments.checks else []
    runs += checks
    if checks:
        part = sum(item.cost.flops for item in checks) / sum(item.cost.flops for item in runs)
        notes.append(
            f"checks: {counted(len(checks), 'run')} of these at other rates and seeds, {part:.0%} "
            "of the FLOPs; 'scale collect' says what they show (--no-checks leaves them out)"
        )
    if (count := len({*arguments.budgets})) < FEWEST_GROUPS:
        notes.append(
            f"{counted(count, 'budget')}: 'scale fit' gives no interval of anything below "
            f"{FEWEST_GROUPS}, and no backtest at a distance; one more at the small end is cheap"
        )
    if machine:
        notes += placement_totals(runs, machine.hardware, machine.mfu)
    return runs, notes + _rule_lines(rule, [item.run for item in runs]), where


def _where(hardware: Hardware, cluster: Path | None) -> str:
    """The flags of 'launcher sweep submit' for this machine."""
    if cluster is None and hardware.nodes == 1:
        return f"--local --ranks {hardware.ranks_per_node}"
    nodes = f"1:{hardware.nodes}" if hardware.nodes > 1 else "1"
    return f"--cluster {cluster or 'FILE'} --nodes {nodes}"


def _rule_lines(rule: Rule, runs: list[RunConfig]) -> list[str]:
    """What the rates and batches rest on."""
    if isinstance(rule, TunedRule):
        return rule.describe(runs)
    words = "learning rate and lanes are those of the Step Law; --rule base keeps the experiment's"
    return [words, *outside_step_law(runs)] if rule is step_law_rule else []


def _table(runs: list[PlannedRun]) -> list[list[str]]:
    """Heads and a row per run, with where it runs if it was planned for a machine."""
    rows = []
    for item in runs:
        run, model, cost = item.run, item.run.model, item.cost
        row = {
            "cell": item.name,
            "layers": str(model.num_layers),
            "d_model": str(model.d_model),
            "heads": str(model.num_heads),
            "N": amount(cost.parameters),
            "body": amount(cost.body_parameters),
            "D": amount(cost.tokens),
            "D/N": f"{cost.tokens / cost.parameters:.1f}",
            "segment": str(run.data.segment_length),
            "memory": str(model.longest_memory),
            "lanes": str(run.data.lanes),
            "steps": str(cost.steps),
            "rate": f"{run.optim.learning_rate:.2e}",
            "C": flops_text(cost.flops),
            "C/6ND": f"{cost.flops / (6 * cost.parameters * cost.tokens):.2f}",
        }
        rows.append(row | (placement(item) if "nodes" in item.facts else {}))
    return [[*rows[0]], *([*row.values()] for row in rows)]


def _totals(runs: list[PlannedRun]) -> list[str]:
    """What all runs cost together, and the disk that they fill."""
    flops, tokens = sum(item.cost.flops for item in runs), sum(item.cost.tokens for item in runs)
    saved = [checkpoint_bytes(item.run) / GIB for item in runs]
    counts = [item.run.checkpoint.num_kept(item.cost.steps) for item in runs]
    kinds = "its last checkpoint " + ("alone" if max(counts) == 1 else "and one per keep_every")
    kept = sum(size * count for size, count in zip(saved, counts, strict=True))
    return [
        f"total: {counted(len(runs), 'run')}, {flops:.3g} FLOPs ({flops / PFLOPS_DAY:.3g} "
        f"PFLOP/s-days), {amount(tokens)} tokens",
        f"disk: each run keeps {kinds}, {kept:,.3g} GiB in all, and has two while it saves, up to "
        f"{2 * max(saved):,.3g} GiB",
    ]
