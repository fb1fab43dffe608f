"""`pretrain scale tune plan` and `report`."""

from __future__ import annotations

import argparse

from data_pipeline.program import Program, add_experiment, check_least
from pretrain.commands.output_paths import check_output_directory
from pretrain.commands.scale import (
    add_report_output,
    add_sweep,
    add_sweep_output,
    sweep_base,
    swept_runs,
)
from pretrain.config.resolve import with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.scaling.intervals import amount
from pretrain.scaling.plan import check_corpus, write_plan
from pretrain.scaling.tune import plan_rates, tuned_rates, tuned_table, verdicts
from pretrain.scaling.tune_again import advice_to_add_rates
from pretrain.terminal.text import counted, fitted_table

PROGRAM = Program(
    "pretrain scale tune",
    "The best learning rate of a run.",
    {
        "plan": (
            "pretrain.commands.scale_tune:plan",
            "write a sweep of learning rates, and if wanted of batch sizes, at equal tokens",
        ),
        "report": (
            "pretrain.commands.scale_tune:report",
            "print the best rate and the range around it, and draw the losses",
        ),
    },
)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale tune plan`."""
    add = parser.add_argument
    base = "experiment to tune; everything but the rate and the lanes stays as it says"
    add_experiment(parser, RunConfig, base)
    rates = "peak learning rates, best 2x apart"
    add("--rates", type=float, nargs="+", required=True, metavar="LR", help=rates)
    lanes = "numbers of lanes, and so batch sizes (default: the experiment's)"
    add("--lanes", type=int, nargs="+", default=[], metavar="N", help=lanes)
    seeds = "train each run once per seed (default: the experiment's)"
    add("--seeds", type=int, nargs="+", default=[], metavar="SEED", help=seeds)
    steps = "steps with the experiment's lanes (default: the experiment's)"
    add("--steps", type=int, metavar="N", help=steps)
    add_sweep_output(parser)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan and write the sweep file."""
    if arguments.steps is not None:
        check_least(arguments, 1, "steps")
    base, name = sweep_base(arguments, "tune")
    runs = plan_rates(
        with_vocabulary(base),
        arguments.rates,
        lanes=arguments.lanes,
        seeds=arguments.seeds,
        steps=arguments.steps,
    )
    unchecked = check_corpus(
        base, runs, fewer_tokens="use fewer --steps or more text", fewer_lanes="smaller --lanes"
    )
    total = f"{counted(len(runs), 'run')} of {amount(runs[0].cost.parameters)} parameters, "
    total += f"{amount(runs[0].cost.tokens)} tokens and about {runs[0].cost.flops:.3g} FLOPs each"
    print("\n".join([total, *unchecked]))
    write_plan(arguments, name, base, runs, [total])
    return 0


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pretrain scale tune report`."""
    add_sweep(parser)
    add_report_output(parser, None, "Learning rates", shown="tune-report in --runs-dir")


def run_report(arguments: argparse.Namespace) -> int:
    """Print the answer and write the page with its chart."""
    from pretrain.scaling.tune_report import write_tune_report

    sweep, runs, cells = swept_runs(arguments, "pretrain scale tune report")
    output = arguments.output or runs / "tune-report"
    check_output_directory("--output", output)
    found, left_out = tuned_rates(cells)
    print(fitted_table(tuned_table(found)))
    advice = advice_to_add_rates(sweep, arguments.sweep, found)
    print("\n".join([*verdicts(found), *advice, *left_out]))
    print(f"report: {write_tune_report(found, runs, output, arguments.title)}")
    return 0
