"""Goodput with failing nodes: by the formula, simulated, and against an hour that was measured."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from benchmarks.measure import markdown_table
from benchmarks.scale.costs import RANKS, RANKS_OF_NODE
from benchmarks.scale.failures import exponential, simulate, uniform, weibull
from pretrain.config.cluster import ClusterConfig
from pretrain.costs.run_time import FailureCosts, costs_on

CHECKPOINT_BYTES = 840e9  # 70B parameters: fp32 weights and two moments
NODE = ClusterConfig(gpus_per_node=str(RANKS_OF_NODE), disk_mib_per_second=500.0)
MTBF_HOURS = (600.0, 6300.0, 50_000.0)  # of a node; the second is Llama 3's on H100
FAILURES = 150  # of each simulation
WEIBULL_SHAPE = 0.7
REPAIR_HOURS = 24.0
MOST_WAITING = 0.01  # the fraction of time without a spare node

# docs/log.md, "100M parameters for an hour, killed every few minutes"
HOUR_SECONDS, HOUR_STEP, HOUR_INTERVAL = 3660.0, 5.9, 4
HOUR_COSTS = FailureCosts(between_failures=270.0, pause=0.014, write=11.3, start=24.5)
HOUR_SEEDS = 200


def hour_of_kills() -> str:
    """Return a sentence that compares the simulation with the measured hour."""
    interval = HOUR_INTERVAL * HOUR_STEP
    found = [
        simulate(HOUR_COSTS, interval, uniform(180.0, 360.0, seed), HOUR_SECONDS)
        for seed in range(HOUR_SEEDS)
    ]
    goodput = sorted(each.goodput for each in found)
    steps = statistics.mean(each.training for each in found) / HOUR_STEP
    cut = HOUR_SEEDS // 20
    return (
        "The hour of kills in docs/log.md, simulated with its own numbers (a kill every 180 to "
        f"360 s): goodput {statistics.mean(goodput):.1%} (90% of {HOUR_SEEDS} seeds between "
        f"{goodput[cut]:.1%} and {goodput[-cut - 1]:.1%}), {steps:.0f} steps; measured 83% and 514."
    )


def spare_nodes(in_repair: float) -> int:
    """Return how many spare nodes are enough, except for MOST_WAITING of the time.

    `in_repair` is how many nodes are in repair on average; their number is Poisson-distributed.
    """
    term = below = math.exp(-in_repair)
    spares = 0
    while below < 1 - MOST_WAITING:
        spares += 1
        term *= in_repair / spares
        below += term
    return spares


def failure_table() -> str:
    """Return goodput and best interval for numbers of ranks and times between failures."""
    header = [
        "ranks", "a node fails every", "the run", "a save takes", "best interval", "goodput",
        "simulated", "in clusters", "spare nodes", "with them", "saved every 2 h",
    ]  # fmt: skip
    rows = [header]
    for ranks in RANKS:
        for hours in MTBF_HOURS:
            node = replace(NODE, mtbf_hours=hours)
            costs = costs_on(node, ranks // RANKS_OF_NODE, CHECKPOINT_BYTES)
            mean, best = costs.between_failures, costs.best_interval
            seconds = FAILURES * mean
            spares = spare_nodes(3600 * REPAIR_HOURS / mean)
            plain = simulate(costs, best, exponential(mean, 1), seconds)
            clusters = simulate(costs, best, weibull(mean, WEIBULL_SHAPE, 1), seconds)
            spared = simulate(
                costs, best, exponential(mean, 1), seconds, spares, 3600 * REPAIR_HOURS
            )
            rows.append([
                f"{ranks:,}", f"{hours:,.0f} h", f"{mean / 3600:.1f} h", f"{costs.write:.0f} s",
                f"{best / 60:.1f} min", f"{costs.goodput(best):.1%}",
                f"{plain.goodput:.1%}", f"{clusters.goodput:.1%}", f"{spares}",
                f"{spared.goodput:.1%}",
                f"{costs.goodput(7200.0):.1%}",
            ])  # fmt: skip
    return markdown_table(rows)
