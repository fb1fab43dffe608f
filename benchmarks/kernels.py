"""`python -m benchmarks kernels`: what the fused kernels take on each GPU, from compiled code.

It needs no GPU. Limits that are missed are listed and make the status 1. `same_length` needs no
kernels of its own, because its window is an argument of every kernel. Rope, which turns queries and
keys before attention, uses `no_position`; alibi and t5 use that with `distance_bias`. Only the
forward kernel has sinks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.measure import markdown_table
from tests.helpers.compiled_kernels import DROPOUT
from tests.helpers.kernel_work import DEVICES, Resources, missed_limits

HEAD_WIDTHS = (41, 64, 80, 96, 128)  # 41, the paper's for WikiText-103, has unaligned rows
_SCORES = ("", "documents", "dropout", "documents,dropout", "grouped", "no_position")
OPTIONS_OF = {
    "forward": (*_SCORES, "distance_bias,no_position", "sinks"),
    "key_gradient": (*_SCORES, "distance_bias,no_position"),
    "query_gradient": ("", "documents", "grouped", "no_position", "adds_positions"),
    "position_gradient": ("", "documents", "grouped", "distance_bias,no_position"),
}
# Every kernel for every device, and each option: the kernels of the static table.
EVERY_OPTION = (
    *(
        f"{kernel}:{width}:{target}"
        for kernel in ("forward", "query_gradient", "key_gradient", "position_gradient")
        for width, target in ((64, 80), (128, 100))
    ),
    "key_gradient:128:80",
    "forward:64:100",
    "forward:128:90:documents,dropout",
    "key_gradient:64:90:documents,dropout",
    "forward:128:90:sinks",
    "forward:41:100:documents,dropout",  # rows that are no multiples of 16 bytes
    "key_gradient:41:80:documents,dropout",
    "forward:64:90:distance_bias,no_position",
    "key_gradient:64:90:distance_bias,no_position",
    "key_gradient:64:90:grouped",
    "key_gradient:128:90:split",
    "position_gradient:64:90:documents,distance_bias",
    "query_gradient:64:90:adds_positions",
    "query_gradient:128:90:adds_positions",
    *(f"{DROPOUT}{target}" for target in DEVICES),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="compile only kernels whose name contains TEXT"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes that compile at the same time (default: 2)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compile and print the table; return 0 if all kernels are within their limits."""
    selected = [name for name in all_kernels() if arguments.only in name]
    parts = [selected[number :: arguments.jobs] for number in range(arguments.jobs)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        kernels = {name: one for part in pool.map(compiled, parts) for name, one in part.items()}
    print(table({name: kernels[name] for name in selected}))
    missed = [
        f"{name}: {limit}" for name in selected for limit in missed_limits(name, kernels[name])
    ]
    print(f"{len(selected)} kernels, {len(missed)} limits missed", *missed, sep="\n")
    return 1 if missed else 0


def all_kernels() -> list[str]:
    """Return "kernel:head width:compute capability[:options]" of every kernel that can run."""
    return [f"{DROPOUT}{target}" for target in DEVICES] + [
        f"{kernel}:{width}:{target}" + (f":{options}" if options else "")
        for target in DEVICES
        for width in HEAD_WIDTHS
        for kernel, all_options in OPTIONS_OF.items()
        for options in all_options
    ]


def compiled(names: list[str]) -> dict[str, Resources]:
    """Compile the kernels in a process without triton's interpreter; return what each takes."""
    kernels = {}
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.compiled_kernels", *names]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stdout is not None
        for name, found in map(json.loads, process.stdout):
            kernels[name] = Resources(**found)
            print(f"compiled {name}", file=sys.stderr, flush=True)
    assert process.returncode == 0, f"status {process.returncode}: {' '.join(command)}"
    return kernels


def table(kernels: dict[str, Resources]) -> str:
    """Return a Markdown table with a row per kernel."""
    header = ["kernel", "head", "sm", "options", "registers", "spill B", "shared KB", "programs"]
    rows = [[*header, "executed / needed"]]
    for name, found in kernels.items():
        kernel, width, target, *options = name.split(":")
        numbers = [found.registers, found.spilled, round(found.shared / 1024), found.programs]
        ratio = f"{found.executed / found.needed:.2f}" if found.needed else "-"
        rows.append([kernel, width, target, "".join(options), *map(str, numbers), ratio])
    return markdown_table(rows)
