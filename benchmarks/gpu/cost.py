"""Memory against `describe`; step time, MFU and a profile of a 1.3B model as it really trains."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu.context import Context, wait_for
from benchmarks.gpu.processes import last_line, run_process
from benchmarks.gpu.training import (
    Trainer,
    dry_large_run,
    forget,
    large_run,
    one_rank,
    resolved,
    small_run,
    vocabulary_of,
)
from data_pipeline.lanes.lane_stream import Prefetcher
from pretrain.config.engine import EngineConfig
from pretrain.config.run import RunConfig
from pretrain.costs.device_memory import memory_parts, total_bytes
from pretrain.costs.devices import DEVICES, device_named
from pretrain.costs.flops import cost_of, flops_of, mean_memory
from pretrain.costs.throughput import measured_matmul_peak, memory_in_use_gib
from pretrain.distributed.world import World

MFU_GOAL = 0.40  # of the maker's peak, without recomputation
MEMORY_RANGE = (0.8, 1.15)  # measured peak over what `describe` says
STEPS, WARM_UP, PROFILED, COSTLIEST = 8, 3, 2, 10
# What trains by default, then one change at a time.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "layers recomputed": {"activation_checkpointing": "full"},
    "without dropout": {"dropout": 0.0},
    "ZeRO 1": {"zero_stage": 1},  # all gradients whole, summed after the backward pass
}
MEMORY_CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 3": {"zero_stage": 3},
    "layers recomputed": {"activation_checkpointing": "full"},
    "plain attention": {"attention_kernel": "plain"},
    "optimizer offloaded": {"offload_optimizer": True},
    "two passes": {"micro_batch_lanes": 2},
}


def memory(context: Context) -> None:
    """Compare the peak of allocated memory over three steps with the estimate of `describe`."""
    for name in context.size(MEMORY_CASES, ("default",)):
        # In a process of its own: an engine that is done with does not free all it has taken.
        measure = partial(memory_of, name, context)
        if status := run_process(measure, context.log, None, context.is_dry):
            error = f"status {status}: {last_line(context.log)}"
            context.report.check(name, False, error=error)


def memory_of(name: str, context: Context) -> int:
    """Report the peak and the estimate of one case; returns 0."""
    on_gpu = context.device.type == "cuda"
    run = small_run(context, EngineConfig(**MEMORY_CASES[name]))
    if on_gpu:  # large enough that what PyTorch itself takes does not matter
        model = replace(run.model, num_layers=12, d_model=1024, num_heads=8)
        run = replace(run, model=replace(model, vocab_size=32_000, memory_length=1024))
        run = replace(run, data=replace(run.data, segment_length=1024))
    with one_rank() as world:
        trainer = Trainer(run, context.corpus, world, context.work)
        trainer.steps(3)
        measured, parts = memory_in_use_gib(context.device), memory_parts(run, 1, on_gpu)
    estimated = total_bytes(parts) / 2**30
    low, high = MEMORY_RANGE
    context.report.check(
        name, not on_gpu or low <= measured / estimated <= high,
        measured_gib=measured, estimated_gib=estimated, over=measured / estimated,
        parts_gib={part.name: part.bytes / 2**30 for part in parts},
    )  # fmt: skip
    return 0


def mfu(context: Context) -> None:
    """Measure steps of the large model with each variant's settings."""
    peak = measured_matmul_peak(context.device, context.dtype, seconds=context.size(1.0, 0.01))
    maker = None if context.is_dry else makers_peak(torch.cuda.get_device_name())
    with one_rank() as world:
        for name, settings in context.size(VARIANTS, {"default": {}}).items():
            run = _sized(large_run(**settings), context)
            trainer = Trainer(run, context.corpus, world, context.work)
            seconds = statistics.median(_step_seconds(trainer, context))
            flops = visible_flops_per_token(run) * run.tokens_per_step
            achieved = flops / seconds
            of_maker = achieved / maker if maker else None
            passed = name != "default" or context.is_dry or (of_maker or 0.0) >= MFU_GOAL
            context.report.check(
                name, passed, seconds=seconds, tokens_per_second=run.tokens_per_step / seconds,
                mfu_of_maker=of_maker, mfu_of_measured=achieved / peak, goal=MFU_GOAL,
                parameters=cost_of(run).parameters, flops_per_token=flops / run.tokens_per_step,
                precision=run.engine.number_format, peak_gib=memory_in_use_gib(context.device),
            )  # fmt: skip
            del trainer
            forget(context.device)


def profile(context: Context) -> None:
    """Report the kernels of two steps with the most time of their own."""
    with one_rank() as world:
        trainer = _warm_trainer(context, world)
        activities = [ProfilerActivity.CPU]
        if context.device.type == "cuda":
            activities = [ProfilerActivity.CUDA]  # operators on the CPU would count twice
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED):
                trainer.step()
            wait_for(context.device)
        for number, row in enumerate(costliest(profiler), start=1):
            context.report.add(f"{number}", **row)


def costliest(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """Return name, milliseconds, share and calls of the kernels that cost the most in a step."""
    averages = profiler.key_averages()
    on_gpu = any(each.self_device_time_total for each in averages)
    times = {
        each.key: (each.self_device_time_total if on_gpu else each.self_cpu_time_total, each.count)
        for each in averages
    }
    total = sum(time for time, _ in times.values())
    first = sorted(times.items(), key=lambda item: -item[1][0])[:COSTLIEST]
    return [
        {
            "kernel": name[:120],
            "ms": microseconds / 1e3 / PROFILED,
            "share": microseconds / total,
            "calls": count // PROFILED,
        }
        for name, (microseconds, count) in first
    ]


def visible_flops_per_token(run: RunConfig) -> float:
    """Return the FLOPs per token of training, with only the pairs that a query sees.

    Query i of L sees the M memory rows and i + 1 keys of its segment: (L + 1) / 2 on average.
    """
    cost, length = cost_of(run).flops_per_token, run.data.segment_length
    remembered = mean_memory(run.model)
    hidden = 1.0 - (remembered + (length + 1) / 2) / (remembered + length)
    return cost - 3 * hidden * flops_of(run.model, length, run.data.lanes).attention


def makers_peak(device_name: str) -> float | None:
    """Return the data sheet's dense bf16 rate of a GPU of this name, if known."""
    name = device_named(device_name)
    return DEVICES[name].bf16 if name else None


def _sized(run: RunConfig, context: Context) -> RunConfig:
    return resolved(
        run if not context.is_dry else dry_large_run(run, vocabulary_of(context)), context
    )


def _warm_trainer(context: Context, world: World) -> Trainer:
    trainer = Trainer(_sized(large_run(), context), context.corpus, world, context.work)
    for _ in range(WARM_UP):  # kernels are compiled, and the memory fills
        trainer.step()
    return trainer


def _step_seconds(trainer: Trainer, context: Context) -> list[float]:
    """Return the seconds of steps on prefetched batches, without the first ones."""
    seconds = []
    with Prefetcher(trainer.batches) as batches:
        trainer.batches = batches
        for _ in range(context.size(STEPS, 1) + WARM_UP):
            start = time.perf_counter()
            trainer.step()
            wait_for(context.device)
            seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]
