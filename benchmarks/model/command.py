"""`python -m benchmarks model`: its benchmarks, the quick ones first."""

from __future__ import annotations

import argparse

import torch

from benchmarks.measure import Benchmark, Section, add_report_arguments, machine, run_benchmarks
from benchmarks.model.attention import attention_comparisons
from benchmarks.model.checkpoints import restart_times, save_comparison
from benchmarks.model.evaluation import evaluation_comparisons
from benchmarks.model.generation import generation_comparisons
from benchmarks.model.training import cost_growth, training_comparisons
from benchmarks.model.yardsticks import yardstick_comparisons
from pretrain.costs.throughput import measured_matmul_peak
from pretrain.terminal.text import si


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_report_arguments(parser)
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of torch (default: 2, as in the goals)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; return 0 if every goal is reached within its tolerance."""
    torch.set_num_threads(arguments.threads)
    peak = measured_matmul_peak(torch.device("cpu"), torch.float32, seconds=1.0)
    heading = f"{machine(arguments.threads)}; matrix products reach {si(peak)}FLOP/s"
    return run_benchmarks(arguments, heading, benchmarks(peak))


def benchmarks(peak: float) -> list[Benchmark]:
    """Return all benchmarks; `peak` is the FLOP/s of a matrix product, for the floors."""
    return [
        *attention_comparisons(peak),
        *evaluation_comparisons(),
        *training_comparisons(peak),
        *yardstick_comparisons(),
        *generation_comparisons(),
        save_comparison(),
        Section("growth of the cost of a token", cost_growth),
        Section("restart to first step", restart_times),
    ]
