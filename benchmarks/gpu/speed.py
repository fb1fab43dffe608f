"""Step time, MFU and device memory of a run as it trains, and where a step's time goes."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu.findings import Context, wait_for
from benchmarks.gpu.gpt import GptTrainer, yardstick
from benchmarks.gpu.training import Trainer, measured_run, one_rank
from data_pipeline.lanes.prefetcher import Prefetcher
from pretrain.config.devices import DEVICES, device_named
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import Footprint
from pretrain.costs.flops import mean_memory, run_cost, token_flops
from pretrain.costs.throughput import measured_matmul_peak, memory_in_use_gib
from pretrain.distributed.world import World

STEPS, WARM_UP, PROFILED, COSTLIEST = 8, 3, 2, 24
# Class -> parts of kernels' names (torch's, its compiler's, libraries', ours); the first counts.
CLASSES = {
    "attention": r"flash|fmha|sdpa|attention|(forward|gradient|content_bias|delta)_kernel|flex",
    "compiled": r"triton_(poi|red|per|for)",
    "GEMM": r"gemm|nvjet|cutlass|xmma|cublas|split_?k|triton_(mm|tem)|\b(add|b|badd)?b?mm\b",
    "copies": r"mem(cpy|set)|copy|\bcat|nccl|gather|scatter|index|embedding|fill",
    "reductions": r"reduce|softmax|norm|sum\b|mean|nll|cross_entropy",
    "pointwise": r"elementwise|multi_tensor|adam|drop_kernel|aten::",
}
Rows = dict[str, tuple[float, int]]  # name -> microseconds of its own, calls


def speed(context: Context) -> None:
    """Measure steps of the case, then profile some."""
    with one_rank() as world:
        trainer = trainer_of(context, world)
        with Prefetcher(trainer.batches) as batches:
            trainer.batches = batches
            measure(trainer, context)
            profile(trainer, context)


def measure(trainer: Trainer | GptTrainer, context: Context) -> None:
    """Report the time of steps, without the first ones."""
    run, seconds = trainer.run, []
    for _ in range(context.size(STEPS, 1) + WARM_UP):
        start = time.perf_counter()
        trainer.step()
        wait_for(context.device)
        seconds.append(time.perf_counter() - start)
    # By then kernels are compiled and the memory is full.
    step_seconds, peak_gib = statistics.median(seconds[WARM_UP:]), memory_in_use_gib(context.device)
    peak = measured_matmul_peak(context.device, context.dtype, context.size(0.5, 0.01))
    flops = visible_flops_per_token(run) * run.tokens_per_step
    maker = None if context.is_dry else makers_peak(torch.cuda.get_device_name())
    values: dict[str, Any] = {}
    if isinstance(trainer, Trainer):
        estimated = Footprint(run, 1, not context.is_dry).device
        values = {"parameters": run_cost(run).parameters, "describe_gib": estimated / 2**30}
    else:
        values["parameters"] = sum(each.numel() for each in trainer.module.parameters())
    context.add(
        "step", case=context.case, seconds=step_seconds, first_seconds=seconds[0],
        tokens_per_second=run.tokens_per_step / step_seconds, tokens=run.tokens_per_step,
        mfu=flops / step_seconds / maker if maker else None,
        mfu_of_measured=flops / step_seconds / peak, matmul_flops=peak,
        flops_per_token=flops / run.tokens_per_step, peak_gib=peak_gib, **values,
        precision=run.engine.number_format, torch=torch.__version__,
    )  # fmt: skip


def trainer_of(context: Context, world: World) -> Trainer | GptTrainer:
    """Return what trains the case."""
    run = measured_run(context.case, context)
    if context.case.startswith("gpt"):
        return GptTrainer(yardstick(run), context.corpus, world)
    return Trainer(run, context.corpus, world, context.work)


def profile(trainer: Trainer | GptTrainer, context: Context) -> None:
    """Report the time of each class of kernels in a step, idle time, and the costliest kernels."""
    # On a GPU, the CPU's operators would count the same work a second time.
    activity = ProfilerActivity.CPU if context.is_dry else ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        start = time.perf_counter()
        for _ in range(PROFILED):
            trainer.step()
        wait_for(context.device)
        wall = time.perf_counter() - start
    rows: Rows = {
        row.key: (row.self_cpu_time_total if context.is_dry else row.self_device_time_total,
                  row.count)
        for row in profiler.key_averages()
    }  # fmt: skip
    context.add("classes", case=context.case, step_ms=1e3 * wall / PROFILED, ms=classes(rows, wall))
    for name, (microseconds, calls) in sorted(rows.items(), key=lambda row: -row[1][0])[:COSTLIEST]:
        context.add(
            name[:100], kind=class_of(name), ms=microseconds / 1e3 / PROFILED,
            calls=calls // PROFILED,
        )  # fmt: skip


def classes(rows: Rows, wall_seconds: float) -> dict[str, float]:
    """Return milliseconds per step of each class, and of the time in which no kernel ran."""
    totals = dict.fromkeys([*CLASSES, "other"], 0.0)
    for name, (microseconds, _) in rows.items():
        totals[class_of(name)] += microseconds / 1e3 / PROFILED
    return totals | {"idle": max(0.0, 1e3 * wall_seconds / PROFILED - sum(totals.values()))}


def class_of(kernel: str) -> str:
    """Return the class of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, names in CLASSES.items() if re.search(names, name)), "other")


def visible_flops_per_token(run: RunConfig) -> float:
    """Return the FLOPs per token of training, with only the pairs that a query sees.

    Query i of L sees the M memory rows and i + 1 keys of its segment: (L + 1) / 2 on average.
    """
    cost, length = run_cost(run).flops_per_token, run.data.segment_length
    remembered = mean_memory(run.model)
    hidden = 1.0 - (remembered + (length + 1) / 2) / (remembered + length)
    return cost - 3 * hidden * token_flops(run.model, length, run.data.lanes).parts["attention"]


def makers_peak(device_name: str) -> float | None:
    """Return the data sheet's dense bf16 rate of a GPU of this name, if known."""
    name = device_named(device_name)
    return DEVICES[name].bf16 if name else None
