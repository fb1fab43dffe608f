"""`pretrain scale memory`: the memory length that is compute-optimal at a budget."""

import argparse
from pathlib import Path

import numpy as np

from foundation.errors import ConfigError
from foundation.sizes import amount_of
from pretrain.commands.scale import check_amount
from pretrain.scaling.collect import read_rows
from pretrain.scaling.intervals import LEVEL, amount, as_loss, shown
from pretrain.scaling.memory_law import (
    BestMemory,
    MemoryFit,
    best_memory,
    fit_memory_law,
    mean_power,
    trained_runs,
)
from pretrain.terminal.text import counted, fitted_table, flops_text

FURTHEST = 10.0  # times the largest or smallest run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain scale memory`."""
    add, flops = parser.add_argument, amount_of("FLOPs")
    add("tables", type=Path, nargs="+", metavar="TABLE", help="of sweeps of lengths of a family")
    add("--flops", type=flops, nargs="+", default=[], metavar="C", help="default: the runs' ends")
    add("--force", action="store_true", help="answer even far outside of the runs' FLOPs")


def run(arguments: argparse.Namespace) -> int:
    """Print the law and the best memory at each budget."""
    for flops in arguments.flops:
        check_amount("flops", flops)
    runs = trained_runs([row for table in arguments.tables for row in read_rows(table)])
    low, high = float(runs.flops_P.min()), float(runs.flops_P.max())
    budgets = sorted(arguments.flops) or [low, high]
    for flops in budgets:
        if not low / FURTHEST <= flops <= high * FURTHEST and not arguments.force:
            raise ConfigError(
                f"--flops {flops:.3g} is over {FURTHEST:g} times outside of the runs "
                f"({low:.3g} to {high:.3g}); add runs nearer to it, or use --force"
            )
    fit = fit_memory_law(runs)
    optima = [best_memory(fit, flops) for flops in budgets]
    heads = ["FLOPs", f"best memory, {LEVEL}% interval", "N", "D", "loss", "without memory"]
    print(_law_text(fit))
    print(fitted_table([heads, *map(_row, optima)]))
    return 0


def _law_text(fit: MemoryFit) -> str:
    law, runs = fit.law, fit.runs
    floor, a, b, g, alpha, beta, gamma = law.numbers
    reference, tokens, shortest = law.reference
    size = f" + {a * reference**alpha:.4g} / N^{alpha:.3f}"
    if np.ptp(runs.parameters_P) == 0:
        floor, size = floor + a, ""
    context = g / mean_power(shortest, law.segment_length, gamma)
    return (
        f"{counted(len(runs.loss_P), 'run')} with segments of {runs.segment_length}: loss = "
        f"{floor:.4g}{size} + {b * tokens**beta:.4g} / D^{beta:.3f} + {context:.4g} "
        f"<k^-{gamma:.3f}>, a mean over tokens with k = memory + 1 to memory + "
        f"{runs.segment_length} keys\n"
        f"mean absolute error {np.abs(law.errors(runs)).mean():.2%}\n"
    )


def _row(optimum: BestMemory) -> list[str]:
    memory = shown(optimum.memory, "{:.0f}".format)
    return [
        flops_text(optimum.flops),
        f"at least {memory}" if optimum.is_edge else memory,
        amount(optimum.parameters),
        amount(optimum.tokens),
        shown(optimum.loss, as_loss),
        f"{optimum.without:.4f} ({optimum.without / optimum.loss.value - 1:+.2%})",
    ]
