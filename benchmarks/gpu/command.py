"""`python -m benchmarks gpu`: run the steps that have no result yet, as far as the time reaches."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from functools import partial
from pathlib import Path

from benchmarks.gpu.bundle import CORPUS, build_dry_corpus, install_wheels
from benchmarks.gpu.context import Context, run_step
from benchmarks.gpu.processes import last_line, prepare, run_process
from benchmarks.gpu.report import Result, append_result, findings_in, results_in, status_of
from benchmarks.gpu.steps import Step, selected
from benchmarks.measure import markdown_table
from foundation.errors import ConfigError, UserError
from pretrain.commands.output_paths import check_output_directory

# One rank talks to nobody; without this it would look for the address of its own name.
NO_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
ENOUGH_FOR_RESULTS = 15.0  # seconds of a command's time that no step gets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--out", type=Path, required=True, help="folder of results and logs")
    parser.add_argument("--bundle", type=Path, help="folder that 'make gpu-bundle' wrote")
    parser.add_argument("--corpus", type=Path, help="corpus to train on (default: the bundle's)")
    parser.add_argument("--steps", default="", metavar="A,B", help="only these steps")
    parser.add_argument("--again", default="", metavar="A,B|all", help="repeat these steps")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="start no step that would end later (0: no end)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")


def run(arguments: argparse.Namespace) -> int:
    """Run the steps; 0 if every selected step has a result and holds, 1 if not."""
    start, is_dry, out = time.monotonic(), arguments.dry_run, arguments.out.absolute()
    steps, again = selected(arguments.steps), _again(arguments.again)
    if not arguments.minutes >= 0:
        raise ConfigError(f"--minutes={arguments.minutes:g} must be 0 (no end) or more")
    check_output_directory("--out", out)
    if not is_dry:
        _require_gpu()
    out.mkdir(parents=True, exist_ok=True)
    known = set(results_in(out, is_dry)) - again
    for name in (step.name for step in steps if step.name in known):
        print(f"{name}: has a result; repeat it with --again {name}", flush=True)
    to_run = [step for step in steps if step.name not in known]
    corpus = _prepared(arguments, out) if to_run else out
    waiting: list[str] = []
    for step in to_run:
        left = float("inf")
        if arguments.minutes:
            left = 60 * arguments.minutes - (time.monotonic() - start) - ENOUGH_FOR_RESULTS
        if left < step.expected:
            waiting.append(step.name)
            continue  # a shorter one may fit
        _run(step, Context(out, corpus, is_dry, step.name), min(step.limit, left))
    if waiting:
        print(f"no time left for {', '.join(waiting)}; rerun the command to continue")
    results = results_in(out, is_dry)
    print(summary(steps, results), flush=True)
    done = [results[step.name].status for step in steps if step.name in results]
    return 0 if done.count("ok") == len(steps) else 1


def summary(steps: list[Step], results: dict[str, Result]) -> str:
    """Return a Markdown table of the steps, with the parts that do not hold."""
    rows = [["step", "status", "seconds", "missed", "purpose"]]
    for step in steps:
        result = results.get(step.name)
        if result is None:
            rows.append([step.name, "not run", "", "", step.purpose])
            continue
        missed = [part for part, each in result.found.items() if not each.get("passed", True)]
        words = ", ".join(missed) or result.error[:80]
        rows.append([step.name, result.status, f"{result.seconds:.0f}", words, step.purpose])
    return markdown_table(rows)


def _run(step: Step, context: Context, limit: float) -> None:
    """Run one step in its process, and write its line."""
    for path in (context.parts, context.log):
        path.unlink(missing_ok=True)
    print(f"{step.name}: {step.purpose} (at most {limit:.0f} s)", flush=True)
    start = time.monotonic()
    work = partial(run_step, step.target, context)
    status = run_process(work, context.log, limit, context.is_dry, is_group=True)
    found = findings_in(context.parts)
    result = Result(
        step=step.name,
        status=status_of(status, found),
        seconds=round(time.monotonic() - start, 1),
        device="cpu" if context.is_dry else "cuda",
        found=found,
        error=last_line(context.log) if status else "",
    )
    append_result(context.out, result)
    print(f"{step.name}: {result.status} after {result.seconds:.0f} s {result.error}", flush=True)


def _again(names: str) -> set[str]:
    return {step.name for step in (selected("" if names == "all" else names) if names else ())}


def _prepared(arguments: argparse.Namespace, out: Path) -> Path:
    """Make everything ready for the first step; returns the corpus."""
    os.environ.update(NO_NETWORK)
    if arguments.bundle and importlib.util.find_spec("deepspeed") is None:
        install_wheels(arguments.bundle, out)
    prepare(arguments.dry_run)
    return _corpus(arguments, out)


def _corpus(arguments: argparse.Namespace, out: Path) -> Path:
    if arguments.corpus:
        return arguments.corpus.absolute()
    if arguments.bundle:
        return (arguments.bundle / CORPUS).absolute()
    if arguments.dry_run:
        return build_dry_corpus(out / CORPUS)
    raise UserError("found no corpus to train on; run 'make gpu-bundle' where there is a network")


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "found no CUDA device; run 'make gpu' on a machine with an NVIDIA GPU, or use DRY_RUN=1"
        )
