"""`python -m benchmarks model`: speed ratios measured in one run, each held against a goal."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.attention import attention_comparisons
from benchmarks.compare import Comparison, Measurement, measure, table
from benchmarks.evaluation import evaluation_comparisons
from benchmarks.restart import restart_table
from benchmarks.saving import saving_comparisons
from benchmarks.scaling import growth_table
from benchmarks.training import training_comparisons
from data_pipeline.errors import UserError
from pretrain.costs.throughput import measured_matmul_peak
from pretrain.terminal.text import si

# What is measured without a goal.
TABLES = {"growth of a token's cost": growth_table, "restart to first step": restart_table}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="threads of this process (default: 2, as in the goals)",
    )
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only comparisons whose name contains this"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="the fused kernel and a 1.3B model on an NVIDIA GPU instead",
    )
    parser.add_argument(
        "--append", type=Path, metavar="FILE", help="add the table to this file, docs/bench.md say"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 0 if every ratio reaches its goal or comes within 15 % of it, else 1."""
    if importlib.util.find_spec("tests") is None:
        raise UserError(
            "found no package 'tests': the bench compares with reference implementations kept beside the tests; "
            "run 'python -m benchmarks model' at the root of a checkout"
        )
    if arguments.gpu:
        from benchmarks.gpu_report import gpu_report

        report, passes = gpu_report()
    else:
        report, passes = _cpu_report(arguments.threads, arguments.only)
    if arguments.append is not None:
        with arguments.append.open("a") as file:
            file.write(f"\n## {datetime.date.today().isoformat()}\n\n{report}\n")
    return 0 if passes else 1


def _cpu_report(threads: int, only: str) -> tuple[str, bool]:
    torch.set_num_threads(threads)
    comparisons = [each for each in all_comparisons() if only in each.name]
    tables = [make for name, make in TABLES.items() if only in name]
    if not comparisons and not tables:
        names = "; ".join([*(each.name for each in all_comparisons()), *TABLES])
        raise UserError(f"--only {only}: no comparison has this in its name; there are: {names}")
    peak = measured_matmul_peak(torch.device("cpu"), torch.float32, seconds=1.0)
    heading = f"{machine()}; matrix products reach {si(peak)}FLOP/s"
    print(heading, flush=True)
    measurements = list(_measured(comparisons))
    parts = [table(measurements, peak)] if measurements else []
    print(*parts)
    for make in tables:
        parts.append(make())
        print(f"\n{parts[-1]}", flush=True)
    return "\n\n".join([f"{heading}.", *parts]), all(each.passes for each in measurements)


def all_comparisons() -> list[Comparison]:
    """Everything the bench measures, the quick ones first."""
    return [
        *attention_comparisons(),
        *evaluation_comparisons(),
        *training_comparisons(),
        *saving_comparisons(),
    ]


def machine() -> str:
    """What the numbers were measured on, in one line that names no host."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB; {torch.get_num_threads()} threads; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _measured(comparisons: Iterable[Comparison]) -> Iterable[Measurement]:
    for comparison in comparisons:
        measurement = measure(comparison)
        print(
            f"{measurement.name}: {measurement.ratio:.2f}x (goal {measurement.goal:.1f}x)",
            flush=True,
        )
        yield measurement


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
