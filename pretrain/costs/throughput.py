"""Measured speed and memory of this process' device."""

import time

import torch

MEASURE_SECONDS = 0.2
MATRIX_WIDTHS = {"cpu": 768, "cuda": 8192}


def measured_matmul_peak(
    device: torch.device, dtype: torch.dtype, seconds: float = MEASURE_SECONDS
) -> float:
    """Return the FLOPs per second of a large matrix product now, with this process' threads.

    Data sheets promise more and ignore other processes on the machine. Ranks that measure at the
    same time measure what they will share.
    """
    width = MATRIX_WIDTHS.get(device.type, 1024)
    # A separate generator: measuring must not change a run's random-number state.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(width, width, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    product = left @ right
    _wait_for(device)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.matmul(left, right, out=product)
        _wait_for(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * width**3 / best


def memory_in_use_gib(device: torch.device) -> float:
    """Return the peak of allocated device memory, or on a CPU the process' resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import psutil

    return psutil.Process().memory_info().rss / 2**30


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
