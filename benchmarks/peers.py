"""`python -m benchmarks peers`: this project against the original's code and NVIDIA's, in turns.

Takes checkouts of kimiyoung/transformer-xl and of NVIDIA/DeepLearningExamples on GitHub. All sides
train and evaluate the same weights on the same text, each in its own process. Rates are tokens per
second of CPU time (user and system), so that a busy machine matters less.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.data.encoding import library_texts
from benchmarks.measure import (
    Benchmark,
    Measurement,
    Section,
    add_report_arguments,
    in_turns,
    machine,
    run_benchmarks,
)
from benchmarks.peer_sides import Case, serve
from foundation.errors import UserError

ORIGINAL, NVIDIA, OURS = "original", "NVIDIA", "ours"
NVIDIA_FOLDER = Path("PyTorch/LanguageModeling/Transformer-XL")
# Files that only one of the two checkouts has, and so identify it.
ORIGINAL_FILES = ("pytorch/mem_transformer.py", "pytorch/run_lm1b_base.sh", "tf")
NVIDIA_FILES = ("pytorch/mem_transformer.py", "pytorch/lamb.py")

TEXT_BYTES = 1_000_000
ROUNDS = 3
LOSS_STEPS = 60
LOSS_GOAL = 1e-8  # largest difference in float64; the original rounds masked scores to float32
EVALUATION_GOAL = 1e-4  # largest difference in float32
SPEED_MODEL = {
    "n_token": 8192,
    "n_layer": 12,
    "n_head": 8,
    "d_model": 512,
    "d_head": 64,
    "d_inner": 2048,
    "d_embed": 512,
    "pre_lnorm": False,
    "same_length": False,
    "clamp_len": -1,
    "tie_weight": True,
    "cutoffs": [],
    "div_val": 1,
    "tie_projs": [False],
}
SPEED_SEGMENTS = {128: 4, 512: 1}  # segment = memory -> segments per round
SMALL_MODEL = {"n_layer": 2, "d_model": 64, "d_embed": 64, "d_inner": 128, "n_token": 256}
LOSS_MODEL = {
    **SPEED_MODEL,
    **SMALL_MODEL,
    "n_head": 2,
    "d_model": 32,
    "d_head": 16,
    "d_embed": 32,
    "mem_len": 24,
}
# Every batch has bytes of all three bins. Without them the sides would differ: for a bin without
# tokens the original has no gradients in today's torch, so Adam skips its weights; ours are zero.
BINS = {"cutoffs": [50, 105], "tie_projs": [False] * 3}
LOSS_VARIANTS: dict[str, dict[str, Any]] = {
    "memory longer than the segment": {},
    "no memory": {"mem_len": 0},
    "memory shorter than the segment": {"mem_len": 8},
    "memory of several segments": {"mem_len": 50},
    "pre-norm": {"pre_lnorm": True},
    "same_length": {"same_length": True},
    "same_length, memory = segment": {"same_length": True, "mem_len": 16},
    "clamped distances": {"clamp_len": 10},
    "same_length, clamped, pre-norm": {"same_length": True, "clamp_len": 10, "pre_lnorm": True},
    "untied embeddings": {"tie_weight": False},
    "narrow embeddings": {"d_embed": 16},
    "narrow embeddings, tied projection": {"d_embed": 16, "tie_projs": [True]},
    "wide heads": {"n_head": 3, "d_head": 24},
    "adaptive softmax": BINS,
    "adaptive softmax, div_val 2": {**BINS, "div_val": 2, "tie_projs": [False, True, True]},
    "adaptive softmax, div_val 2, untied": {**BINS, "div_val": 2, "tie_weight": False},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_report_arguments(parser)
    parser.add_argument(
        "--original", type=Path, metavar="DIR", help="checkout of kimiyoung/transformer-xl"
    )
    parser.add_argument(
        "--nvidia", type=Path, metavar="DIR", help="checkout of NVIDIA/DeepLearningExamples"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of each side (default: 1)")
    parser.add_argument(
        "--small", action="store_true", help="measure speed on a tiny model, to try the command"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; return 0 if all sides compute the same losses."""
    checkouts = checkouts_of(arguments.original, arguments.nvidia)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(closing(SideProcess(name, checkout, arguments.threads)))
            for name, checkout in checkouts.items()
        }
        patches = {name: side.patches for name, side in sides.items()}
        heading = machine(arguments.threads)
        cases = benchmarks(sides, arguments.small)
        return run_benchmarks(arguments, heading, cases, notes=patch_list(patches))


def checkouts_of(original: Path | None, nvidia: Path | None) -> dict[str, Path | None]:
    """Return each side with the folder of its code; UserError if a directory is not a checkout."""
    if original is None and nvidia is None:
        raise UserError("found neither --original nor --nvidia; give one checkout or both")
    sides: dict[str, Path | None] = {}
    if original is not None:
        if not _has_all(original, ORIGINAL_FILES):
            raise UserError(
                f"--original {original} is not a checkout of kimiyoung/transformer-xl; "
                f"expected {', '.join(ORIGINAL_FILES)} in it"
            )
        sides[ORIGINAL] = original.resolve()
    if nvidia is not None:
        # The path may also be the model's own folder.
        folders = [nvidia / NVIDIA_FOLDER, nvidia]
        folder = next((path for path in folders if _has_all(path, NVIDIA_FILES)), None)
        if folder is None:
            raise UserError(
                f"--nvidia {nvidia} is not a checkout of NVIDIA/DeepLearningExamples; "
                f"expected {', '.join(NVIDIA_FILES)} in {NVIDIA_FOLDER}"
            )
        sides[NVIDIA] = folder.resolve()
    return {**sides, OURS: None}


def _has_all(folder: Path, names: Sequence[str]) -> bool:
    return all((folder / name).exists() for name in names)


class SideProcess:
    """One side in its own process, which answers one request at a time."""

    def __init__(self, name: str, checkout: Path | None, threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # a side inherits no imports
        self._name = name
        self._connection, theirs = context.Pipe()
        arguments = (theirs, name, checkout, threads)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.patches: list[str] = self._answer()

    def close(self) -> None:
        """End the process; it has nothing to save."""
        self._process.terminate()
        self._process.join()

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what the side's method returns."""
        with suppress(BrokenPipeError):  # `_answer` reports how its process ended
            self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            succeeded, result = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            succeeded, result = False, f"its process exited with status {self._process.exitcode}"
        if not succeeded:
            raise UserError(f"the code of '{self._name}' failed: {result}; its output is above")
        return result


def benchmarks(sides: Mapping[str, SideProcess], small: bool = False) -> list[Benchmark]:
    """Return the speeds of all sides, then the losses of the original and ours."""
    text = "".join(library_texts(TEXT_BYTES)).encode()
    model = {**SPEED_MODEL, **(SMALL_MODEL if small else {})}
    cases = [
        Case(f"segment = memory = {length}", {**model, "mem_len": length}, length, 8, dropout=0.1)
        for length in SPEED_SEGMENTS
    ]
    sections: list[Benchmark] = [
        Section(f"speed, {case.name}", partial(_speeds, sides, case, text)) for case in cases
    ]
    if ORIGINAL in sides:
        sections += [
            Section(f"losses, {name}", partial(_losses, sides, name, text))
            for name in LOSS_VARIANTS
        ]
    return sections


def _speeds(
    sides: Mapping[str, SideProcess], case: Case, text: bytes, _: Path
) -> Iterator[Measurement]:
    segments = SPEED_SEGMENTS[case.segment_length]
    tokens = segments * case.lanes * case.segment_length
    _load(sides, case, text)
    # Two segments, so that the second one reads memory.
    losses = {name: side.call("evaluate", max(2, segments))[1] for name, side in sides.items()}
    for name in list(losses)[:-1]:
        what = f"evaluation losses, {case.name}: largest difference between {name} and ours"
        difference = largest_difference(losses[name], losses[OURS])
        yield Measurement(what, [difference], "", at_most=EVALUATION_GOAL, tolerance=0.0)
    for method, noun in (("evaluate", "evaluation"), ("train", "training")):
        calls = {name: partial(_seconds, side, method, segments) for name, side in sides.items()}
        yield from speed_measurements(f"{noun}, {case.name}", tokens, in_turns(calls, ROUNDS))


def _losses(
    sides: Mapping[str, SideProcess], name: str, text: bytes, _: Path
) -> Iterator[Measurement]:
    """Yield the largest difference in float64; the detail has float32's, to show rounding."""
    pair = {each: sides[each] for each in (ORIGINAL, OURS)}
    # Weights are large enough for attention to be far from uniform.
    case = Case(
        name,
        {**LOSS_MODEL, **LOSS_VARIANTS[name]},
        segment_length=16,
        lanes=4,
        learning_rate=1e-3,
        init_std=0.1,
    )
    differences = {}
    for dtype in ("float32", "float64"):
        _load(pair, replace(case, dtype=dtype), text)
        theirs, ours = (side.call("train", LOSS_STEPS)[1] for side in pair.values())
        differences[dtype] = largest_difference(theirs, ours)
    yield Measurement(
        f"{LOSS_STEPS} training losses, {name}: largest difference in float64",
        [differences["float64"]],
        "",
        at_most=LOSS_GOAL,
        tolerance=0.0,
        detail=f"float32: {differences['float32']:.1e}; losses {ours[0]:.3f} -> {ours[-1]:.3f}",
    )


def _load(sides: Mapping[str, SideProcess], case: Case, text: bytes) -> None:
    """Build the model on all sides, with the weights that the first one draws."""
    first, *others = sides.values()
    first.call("load", case, text)
    weights = first.call("weights")
    for side in others:
        side.call("load", case, text, weights)


def _seconds(side: SideProcess, method: str, segments: int) -> float:
    return side.call(method, segments)[0]


def speed_measurements(
    name: str, tokens: int, seconds: Mapping[str, Sequence[float]]
) -> Iterator[Measurement]:
    """Yield how many times as fast ours is as each other side, from CPU seconds per round."""
    rates = {side: tokens / statistics.median(values) for side, values in seconds.items()}
    for side, values in seconds.items():
        if side != OURS:
            ratios = [theirs / ours for theirs, ours in zip(values, seconds[OURS], strict=True)]
            detail = f"{rates[side]:,.0f} -> {rates[OURS]:,.0f} tokens per CPU second"
            yield Measurement(f"{name}: ours over {side}", ratios, detail=detail)


def largest_difference(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return the largest absolute difference; NaN if there is any NaN."""
    differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def patch_list(patches: Mapping[str, Sequence[str]]) -> str:
    """Return each side's patches as a Markdown list."""
    lines = [f"* {side}: {patch}" for side, found in patches.items() for patch in found]
    return "\n".join(["Patched at run time, in the process of that side alone:", "", *lines])
