"""`python -m benchmarks gpu`: run the steps that have no result yet, as many as time allows."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.bundle import CORPUS, build_dry_corpus, install_wheels
from benchmarks.gpu.findings import CPU, END, Context, Finding, findings_in, run_step
from benchmarks.gpu.processes import last_line, prepare, run_process
from benchmarks.gpu.steps import ROOT, Step, known_steps, selected
from benchmarks.measure import markdown_table
from benchmarks.peers import NVIDIA, checkouts_of
from foundation.cli import check_output_directory
from foundation.errors import ConfigError, UserError

COMMITTED = ROOT / "benchmarks" / "gpu" / "results.jsonl"
# One rank talks to nobody; without this it would look for the address of its own name.
NO_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
ENOUGH_FOR_RESULTS = 15.0  # seconds at the command's end that no step gets
MFU_GOALS = {"relative_1b": 0.40, "xl_modern_1b": 0.45}
STEP_GOAL, EVALUATION_GOAL = 1.1, 5.0  # times the GPT's step; times the rate in float32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of logs and of the table of tiles")
    add("--results", type=Path, help=f"file of results (default {COMMITTED.relative_to(ROOT)})")
    add("--bundle", type=Path, help="folder that 'make gpu-bundle' wrote")
    add("--corpus", type=Path, help="corpus to train on (default: the bundle's)")
    add("--nvidia", type=Path, help="checkout of NVIDIA/DeepLearningExamples, to measure it too")
    add("--steps", default="", metavar="A,B", help="only these steps")
    add("--again", default="", metavar="A,B|all", help="repeat these steps")
    minutes = "start no step that would end later (0: no end); with --dry-run print the schedule"
    add("--minutes", type=float, default=0.0, help=minutes)
    add("--dry-run", action="store_true", help="tiny sizes on the CPU")


def run(arguments: argparse.Namespace) -> int:
    """Run the steps; 0 if every selected step has ended and holds, 1 if not."""
    start, is_dry, out = time.monotonic(), arguments.dry_run, arguments.out.absolute()
    steps, again = selected(arguments.steps), _again(arguments.again)
    if not arguments.minutes >= 0:
        raise ConfigError(f"--minutes={arguments.minutes:g} must be 0 (no end) or more")
    check_output_directory("--out", out)
    is_plan = is_dry and arguments.minutes > 0
    results = (out / COMMITTED.name) if is_dry and not is_plan else COMMITTED
    results = arguments.results.absolute() if arguments.results else results
    device = CPU if is_dry else device_name()
    known = known_steps(findings_in(results), None if is_plan else device) - again
    if arguments.nvidia is None and any(step.name == "nvidia" for step in steps):
        print("nvidia: skipped, no checkout of NVIDIA/DeepLearningExamples given (NVIDIA=DIR)")
        steps = [step for step in steps if step.name != "nvidia"]
    print(schedule(steps, known, 60 * arguments.minutes), flush=True)
    if is_plan:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    context = Context(out=out, results=results, corpus=out, step="", device_name=device)
    if to_run := [step for step in steps if step.name not in known]:
        context = _prepared(arguments, context)
    for step in to_run:
        left = float("inf")
        if arguments.minutes:
            left = 60 * arguments.minutes - (time.monotonic() - start) - ENOUGH_FOR_RESULTS
        if left >= step.expected:  # else a shorter one may fit
            _run(step, context, min(step.limit, left))
    ends = _latest(findings_in(results), steps, device)
    print(summary(steps, ends))
    print(goals(findings_in(results)), flush=True)
    return 0 if [end.values["status"] for end in ends.values()] == ["ok"] * len(steps) else 1


def schedule(steps: Sequence[Step], known: set[str], seconds: float) -> str:
    """Return a Markdown table of the steps that fit into `seconds` by their expected times."""
    rows, clock = [["step", "starts at", "expected", "at most", "what it measures"]], 0.0
    for step in steps:
        starts = f"{clock:.0f} s"
        if step.name in known:
            starts = "known"
        elif seconds and clock + step.expected > seconds - ENOUGH_FOR_RESULTS:
            starts = "no time"
        else:
            clock += step.expected
        numbers = (f"{step.expected:.0f} s", f"{step.limit:.0f} s")
        rows.append([step.name, starts, *numbers, step.purpose])
    return markdown_table(rows)


def summary(steps: Sequence[Step], ends: dict[str, Finding]) -> str:
    """Return a Markdown table of how the steps ended with today's code."""
    rows = [["step", "status", "seconds", "error"]]
    for step in steps:
        end = ends[step.name].values if step.name in ends else {"status": "not run"}
        seconds, error = str(end.get("seconds", "")), str(end.get("error", ""))
        rows.append([step.name, str(end["status"]), seconds, error[:80]])
    return markdown_table(rows)


def goals(findings: Sequence[Finding]) -> str:
    """Return a Markdown table of the goals, by the latest findings on a GPU."""
    found: dict[str, dict[str, Any]] = {}
    for each in findings:
        if each.device != CPU and each.part != END:
            found[f"{each.step}: {each.part}"] = each.values

    def best(name: str, value: str) -> list[float]:
        parts = (found.get(f"{step}: step") for step in (name, f"{name}-compiled"))
        return [each[value] for each in parts if each and each.get(value)]

    rows = [["goal", "expected", "found", "result"]]

    def add(name: str, expected: str, value: float | None, is_met: bool) -> None:
        words = "not measured" if value is None else "met" if is_met else "missed"
        rows.append([name, expected, "" if value is None else f"{value:.3g}", words])

    for case, step in (("relative_1b", "speed-relative"), ("xl_modern_1b", "speed-1b")):
        mfu = max(best(step, "mfu"), default=None)
        goal = MFU_GOALS[case]
        add(f"MFU of {case}", f"at least {goal:g}", mfu, (mfu or 0.0) >= goal)
    ours, gpt = best("speed-1b", "seconds"), best("speed-gpt", "seconds")
    over = min(ours) / min(gpt) if ours and gpt else None
    name = "step of xl_modern_1b over the plain GPT's"
    add(name, f"at most {STEP_GOAL:g}", over, (over or 0.0) <= STEP_GOAL)
    rates = [found.get(f"evaluation: torch.{dtype}") for dtype in ("bfloat16", "float32")]
    speedup = None
    if rates[0] and rates[1]:
        speedup = rates[0]["tokens_per_second"] / rates[1]["tokens_per_second"]
    name = "evaluation in bf16 over float32"
    add(name, f"at least {EVALUATION_GOAL:g}", speedup, (speedup or 0.0) >= EVALUATION_GOAL)
    return markdown_table(rows)


def _run(step: Step, context: Context, limit: float) -> None:
    """Run one step in its process, and write how it ended."""
    fingerprint = step.fingerprint
    context = replace(
        context, step=step.name, case=step.case, fingerprint=fingerprint, seconds=limit
    )
    context.log.unlink(missing_ok=True)
    print(f"{step.name}: {step.purpose} (at most {limit:.0f} s)", flush=True)
    before, start = len(findings_in(context.results)), time.monotonic()
    status = run_process(
        partial(run_step, step.target, context), context.log, limit, context.is_dry
    )
    new = findings_in(context.results)[before:]
    missed = [each.part for each in new if not each.values.get("passed", True)]
    end = "timed out" if status is None else "failed" if status else "missed" if missed else "ok"
    error = last_line(context.log) if status else ", ".join(missed)
    context.add(END, status=end, seconds=round(time.monotonic() - start), error=error)


def _latest(findings: Sequence[Finding], steps: Sequence[Step], device: str) -> dict[str, Finding]:
    """Return the last end of each step with today's code on this device."""
    today = {step.name: step.fingerprint for step in steps}
    return {
        each.step: each
        for each in findings
        if each.part == END and each.device == device and today.get(each.step) == each.fingerprint
    }


def _again(names: str) -> set[str]:
    return {step.name for step in (selected("" if names == "all" else names) if names else ())}


def _prepared(arguments: argparse.Namespace, context: Context) -> Context:
    """Prepare wheels, corpus and imports for the first step; return the context of the steps."""
    os.environ.update(NO_NETWORK)
    if arguments.bundle and importlib.util.find_spec("deepspeed") is None:
        install_wheels(arguments.bundle, context.out)
    nvidia = checkouts_of(None, arguments.nvidia)[NVIDIA] if arguments.nvidia else None
    prepare(arguments.dry_run)
    if arguments.corpus:
        corpus = arguments.corpus.absolute()
    elif arguments.bundle:
        corpus = (arguments.bundle / CORPUS).absolute()
    elif arguments.dry_run:
        corpus = build_dry_corpus(context.out / CORPUS)
    else:
        raise UserError("found no corpus to train on; run 'make gpu-bundle' on a networked machine")
    return replace(context, nvidia=nvidia, corpus=corpus)


def device_name() -> str:
    """Return the name of the GPU; UserError if there is none."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "found no CUDA device; run 'make gpu' on a machine with an NVIDIA GPU, or use DRY_RUN=1"
        )
    return torch.cuda.get_device_name()
