"""How a rank starts on this machine: the cores beside its GPU, and what it says when it hangs."""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks.gpu.context import Context, wait_for
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.processes.core_binding import (
    address_of,
    available_cores,
    bind_to_cores_beside_gpu,
    cores_beside,
)
from pretrain.processes.last_collectives import dumps, write_last_collectives
from pretrain.rundir.collective_traces import make_trace_directory

BLOCKED_CYCLES = 10_000_000_000  # of the GPU's clock: about five seconds
LAST_WORDS_GOAL = 3.0  # seconds; the watchdog waits for five


def cores(context: Context) -> None:
    """Report what the kernel names for the GPU, and bind as `pretrain train` does."""
    words: dict[str, object] = {}
    if context.device.type == "cuda":
        address = address_of(context.device)
        beside = asdict(cores_beside(address))
        words |= {"address": address, **beside, "cores": sorted(beside["cores"])}
    before = os.sched_getaffinity(0)
    decision = bind_to_cores_beside_gpu(context.device, torch.get_num_threads())
    now = os.sched_getaffinity(0)
    wanted = before if decision is None or decision.cores is None else decision.cores
    os.sched_setaffinity(0, before)
    context.report.check(
        "cores", now == wanted, reason=decision.reason if decision else "no GPU",
        bound=sorted(now), available=len(available_cores()), **words,
    )  # fmt: skip


def recorder(context: Context) -> None:
    """Block the device, and let the rank write its last collectives as its watchdog would."""
    init_world()
    try:
        ones = torch.ones(3, device=context.device)
        dist.all_reduce(ones)
        wait_for(context.device)
        if context.device.type == "cuda":
            torch.cuda._sleep(BLOCKED_CYCLES)
        work = dist.all_reduce(ones, async_op=True)
        make_trace_directory(context.work, {})
        start = time.monotonic()
        first = dict(dumps(has_stacks=False))  # what a rank writes first
        seconds = time.monotonic() - start
        paths = write_last_collectives(context.work, 0, {})
        with_stacks = time.monotonic() - start
        assert work is not None
        work.wait()
        wait_for(context.device)
    finally:
        destroy_process_group()
    backend = "gloo" if context.device.type == "cpu" else "nccl"
    # Our own process wrote them a moment ago.
    records = {path.name: pickle.loads(path.read_bytes())["entries"] for path in paths}
    last = [{key: record[key] for key in ("profiling_name", "state", "retired")}
            for record in records.get(f"{backend}-rank-0", [])[-2:]]  # fmt: skip
    context.report.check(
        "recorder", backend in first and len(last) == 2 and seconds < LAST_WORDS_GOAL,
        seconds=seconds, with_stacks=with_stacks, last=last,
    )  # fmt: skip
