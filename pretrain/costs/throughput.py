"""What the machine can do and what a run takes of it."""

from __future__ import annotations

import time

import torch

MEASURE_SECONDS = 0.2
MATRIX_WIDTHS = {"cpu": 768, "cuda": 8192}


def measured_matmul_peak(
    device: torch.device, dtype: torch.dtype, seconds: float = MEASURE_SECONDS
) -> float:
    """Floating-point operations per second that a large matrix product reaches now, with this process' threads.

    Data sheets promise more and know nothing of other processes on the machine; ranks that measure at the same time
    measure what they will share.
    """
    width = MATRIX_WIDTHS.get(device.type, 1024)
    generator = torch.Generator(device).manual_seed(
        0
    )  # a resumed run must not draw from its own random numbers here
    left, right = (
        torch.randn(width, width, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    product = left @ right
    _wait_for(device)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:
        begin = time.perf_counter()
        torch.matmul(left, right, out=product)
        _wait_for(device)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * width**3 / best


def memory_in_use_gib(device: torch.device) -> float:
    """What this rank holds: the most the device has held, or the resident memory of the process where it is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import psutil

    return psutil.Process().memory_info().rss / 2**30


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
