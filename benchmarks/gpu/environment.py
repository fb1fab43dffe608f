"""What the machine has: versions, device, tools, rates, and what a run would be refused for."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from benchmarks.gpu.context import Context, wait_for
from benchmarks.gpu.startup import cores, recorder
from pretrain.costs.throughput import measured_matmul_peak
from pretrain.kernels.triton.settings import unsupported_reason

PACKAGES = (
    *("torch", "triton", "numpy", "deepspeed", "pydantic", "hjson", "safetensors"),
    *("sentencepiece", "pyyaml", "psutil", "pytest", "streaming", "webdataset", "zstandard"),
)
NEEDED = ("torch", "numpy", "deepspeed", "safetensors", "sentencepiece", "pyyaml", "psutil")
TOOLS = ("cc", "gcc", "nvcc", "ncu", "compute-sanitizer", "numactl")
QUERY = "driver_version,clocks.sm,power.limit,mig.mode.current"


def run(context: Context) -> None:
    """Record all of it; what steps need has to be there."""
    versions = {name: _version(name) for name in PACKAGES}
    missing = [name for name in NEEDED if not versions[name]]
    context.report.check("packages", not missing, missing=missing, python=sys.version, **versions)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    tools = {name: shutil.which(name) or "" for name in TOOLS}
    compiles = bool(tools["cc"] or tools["gcc"]) and headers.exists()
    # Triton builds its launcher with them at the first call of a kernel.
    context.report.check("tools", context.is_dry or compiles, headers=headers.exists(), **tools)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    context.report.add(
        "machine", cores=os.cpu_count(), host_gib=pages / 2**30, system=platform.platform(),
        disk_gib=shutil.disk_usage(context.out).free / 2**30,
    )  # fmt: skip
    if context.device.type == "cuda":
        _device(context)
    seconds = context.size(1.0, 0.01)
    peak = measured_matmul_peak(context.device, context.dtype, seconds=seconds)
    context.report.add("rates", matmul_flops=peak, copy_bytes_per_second=_copy_rate(context))
    cores(context)
    recorder(context)


def _device(context: Context) -> None:
    properties = torch.cuda.get_device_properties(context.device)
    refused = unsupported_reason(context.device)
    context.report.check(
        "device",
        refused is None,
        name=properties.name,
        gib=properties.total_memory / 2**30,
        capability=list(torch.cuda.get_device_capability()),
        cuda=torch.version.cuda,
        multiprocessors=properties.multi_processor_count,
        fused_attention_refused=refused,
        nvidia_smi=_output("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version({"streaming": "mosaicml-streaming"}.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError as error:
        return str(error)


def _copy_rate(context: Context) -> float:
    """Return the bytes read and written per second by a copy on the device."""
    source = torch.zeros(context.size(1 << 28, 1 << 18), device=context.device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        wait_for(context.device)
        start = time.perf_counter()
        target.copy_(source)
        wait_for(context.device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() * source.element_size() / best
