"""Fused attention against PyTorch's best without the relative term, plain, and compiled plain."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu.attention import AttentionInputs, Shape, path_of
from benchmarks.gpu.context import Context
from benchmarks.measure import in_turns, timed
from pretrain.model.attention_paths import plain_attention

SHAPES = (Shape(B=4, L=2048, M=2048, N=16, H=128), Shape(B=4, L=2048, M=2048, N=32, H=64))
DRY_SHAPES = (Shape(B=2, L=12, M=7, N=2, H=16),)
GOALS = {128: 2.0, 64: 1.6}  # times the time of flash attention, which has no relative term
MEMORY_GOAL = 12.0  # times less device memory than plain operations
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
OURS, PLAIN, COMPILED = "ours", "plain", "compiled plain"


def run(context: Context) -> None:
    """Measure the shapes of the goals, first times, then peaks of device memory."""
    for shape in context.size(SHAPES, DRY_SHAPES):
        inputs = AttentionInputs(shape, context.device, context.dtype)
        working, reasons = runnable(ways(inputs, context.is_dry), inputs)
        rounds = context.size(10, 1)
        forward = milliseconds({n: inputs.forward(way) for n, way in working.items()}, rounds)
        both = milliseconds(
            {name: inputs.forward_and_backward(way) for name, way in working.items()}, rounds
        )
        flash = min((name for name in both if name in BACKENDS), key=lambda name: both[name])
        ratio, goal = both[OURS] / both[flash], GOALS.get(shape.H, max(GOALS.values()))
        context.report.check(
            str(shape), context.is_dry or ratio <= goal, best=flash, over_best=ratio, goal=goal,
            over_best_forward=forward[OURS] / forward[flash], over_plain=both[OURS] / both[PLAIN],
            forward_ms=forward, both_ms=both, refused=reasons,
        )  # fmt: skip
    for shape in context.size(SHAPES, DRY_SHAPES):
        _memory(shape, context)


def ways(inputs: AttentionInputs, is_dry: bool = False) -> dict[str, Callable[[], Tensor]]:
    """Return the ways to compute attention, by name."""
    # A dry run traces, too, but leaves out the compiler, which takes most of a minute on a CPU.
    compiled = torch.compile(plain_attention, backend="eager" if is_dry else "inductor")
    fused = path_of(inputs.shape, inputs.query_BLNH.device, inputs.query_BLNH.dtype)
    return {
        OURS: partial(inputs.relative, fused),
        **{n: partial(inputs.without_positions, getattr(SDPBackend, n)) for n in BACKENDS},
        PLAIN: partial(inputs.relative, plain_attention),
        COMPILED: partial(inputs.relative, compiled),
    }


def runnable(
    ways: dict[str, Callable[[], Tensor]], inputs: AttentionInputs
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Return the ways that run here, and for the others the reason that PyTorch gives."""
    reasons: dict[str, str] = {}
    for name, way in ways.items():
        try:
            inputs.forward_and_backward(way)()
        except Exception as error:  # PyTorch's compiler raises many kinds
            if name == OURS:
                raise
            reasons[name] = f"{type(error).__name__}: {error}"[:200]
    return {name: way for name, way in ways.items() if name not in reasons}, reasons


def milliseconds(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median time of each, measured in turns."""
    seconds = in_turns({name: timed(work) for name, work in works.items()}, rounds)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def _memory(shape: Shape, context: Context) -> None:
    """Report the peak device memory of ours and of plain operations, without inputs."""
    if context.is_dry:
        context.report.add(f"device memory, {shape}", note="needs a device: allocator's peak")
        return
    inputs, device = AttentionInputs(shape, context.device, context.dtype), context.device

    def peak(way: Callable[[], Tensor]) -> int:
        work = inputs.forward_and_backward(way)
        work()  # the first call compiles
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before

    found = ways(inputs)
    ours, plain = peak(found[OURS]), peak(found[PLAIN])
    context.report.check(
        f"device memory, {shape}", plain / ours >= MEMORY_GOAL, ours=ours, plain=plain,
        plain_over_ours=plain / ours, goal=MEMORY_GOAL,
    )  # fmt: skip
