"""What `python -m benchmarks model --gpu` prints, and whether every goal is reached."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks import gpu
from benchmarks.compare import TOLERANCE, measure, table
from data_pipeline.errors import UserError
from pretrain.costs.devices import DEVICES
from pretrain.costs.flops import cost_of
from pretrain.costs.throughput import measured_matmul_peak

STEPS = 6  # of the large model; the first two, in which kernels are compiled and the memory fills, do not count
WARM_UP = 2
ERROR_MARGIN = 1.5  # times the error of plain operations in the same precision


def gpu_report() -> tuple[str, bool]:
    """Text in Markdown, and whether all goals are reached within the bench's tolerance; UserError without a GPU."""
    if not torch.cuda.is_available():
        raise UserError(
            "found no CUDA device; run 'make bench-gpu' on a machine with an NVIDIA GPU"
        )
    device, dtype = torch.device("cuda"), torch.bfloat16
    name = torch.cuda.get_device_name(device)
    peak = measured_matmul_peak(device, dtype, seconds=1.0)
    sections, verdicts = (
        [f"{name}, torch {torch.__version__}; matrix products reach {peak / 1e12:.0f} TFLOP/s"],
        [],
    )
    for text, passes in _parts(device, dtype, promised_flops(name) or peak):
        sections.append(text)
        verdicts.append(passes)
        print(text, flush=True)
    return "\n\n".join(sections), all(verdicts)


def promised_flops(device_name: str) -> float | None:
    """The data sheet's dense bf16 rate of a GPU of this name, if known."""
    return next((device.bf16 for name, device in DEVICES.items() if name in device_name), None)


def _parts(device: torch.device, dtype: torch.dtype, peak: float) -> Iterator[tuple[str, bool]]:
    yield correctness(gpu.CHECKED, device, dtype)
    measurements = [
        measure(comparison)
        for shape in gpu.SHAPES
        for comparison in gpu.attention_comparisons(shape, device, dtype)
    ]
    yield table(measurements, peak), all(measurement.passes for measurement in measurements)
    for shape in gpu.SHAPES:
        ratio = gpu.memory_ratio(shape, device, dtype)
        passes = ratio >= TOLERANCE * gpu.MEMORY_GOAL
        yield (
            f"plain operations take {ratio:.1f}x the memory (goal {gpu.MEMORY_GOAL:.0f}x), {shape.name}",
            passes,
        )
    run = gpu.large_run()
    work = gpu.training_step(run, device, dtype)
    seconds = statistics.median([_seconds(work) for _ in range(STEPS)][WARM_UP:])
    cost = cost_of(run)
    mfu = cost.flops_per_token * cost.tokens_per_step / seconds / peak
    yield (
        f"training step of {cost.parameters / 1e9:.2f}B parameters: {seconds:.3f} s, "
        f"{cost.tokens_per_step / seconds:,.0f} tokens/s, MFU {mfu:.1%} (goal {gpu.MFU_GOAL:.0%})",
        mfu >= TOLERANCE * gpu.MFU_GOAL,
    )


def correctness(shape: gpu.Shape, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """The errors of the path taken on the device, and whether none is well above that of plain operations."""
    errors = gpu.errors_against_float64(shape, device, dtype)
    lines = [f"errors against float64 ({shape.name}):"]
    lines += [
        f"  {name}: {ours:.1e}, plain operations {plain:.1e}"
        for name, (ours, plain) in errors.items()
    ]
    return "\n".join(lines), all(ours <= ERROR_MARGIN * plain for ours, plain in errors.values())


def _seconds(work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
