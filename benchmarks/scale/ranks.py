"""`python -m benchmarks.scale.ranks N ...`: gloo ranks that do what each step does; prints JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

STEPS, STEP_SECONDS = 30, 0.05
REPLICATED = 1000  # tensors of weights, as 70B parameters have
FIRST_STEPS = 3  # steps that are not timed, because ranks connect to each other


def rank_program(results: Path) -> int:
    """Exchange stop requests as the training loop does; write what this rank measured."""
    from pretrain.distributed.collectives import gather_values
    from pretrain.distributed.world import destroy_process_group, init_world
    from pretrain.recovery.stop_requests import StopRequest

    world, stop = init_world(), StopRequest()
    exchange = timed(lambda: stop.ask()())
    started, waits = time.thread_time(), []
    for _ in range(STEPS):
        answer = stop.ask()
        time.sleep(STEP_SECONDS)  # the last micro-batch; it leaves the cores to other ranks
        before = time.perf_counter()
        answer()
        waits.append(time.perf_counter() - before)
    cpu = (time.thread_time() - started) / STEPS
    saving = timed(exchanges_of_a_save)
    measured = {
        # On a busy machine most waits are for a rank that got no core, not for its answer.
        "wait": statistics.quantiles(waits)[0],
        "exchange": exchange,
        "cpu": cpu,
        "saving": saving,
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    (results / f"{world.rank}.json").write_text(json.dumps(measured))
    gather_values(world.rank, int)  # no rank leaves before all have counted descriptors
    destroy_process_group()
    return 0


def exchanges_of_a_save() -> None:
    """Exchange what `Checkpointer.save` exchanges in the loop: whether the previous save failed,
    sums of replicated tensors, bytes, and rank 0's reason not to save."""
    import torch

    from pretrain.distributed.collectives import broadcast_value, gather_present
    from pretrain.distributed.messages import gather_rows, max_over_ranks

    for _ in ("written", "published"):
        gather_present(None, str)
    max_over_ranks(torch.zeros(2 * REPLICATED, dtype=torch.int64))
    gather_rows(torch.tensor(1))
    broadcast_value(None, str | None)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of the work, the first decile of many, once ranks are connected."""
    seconds = []
    for _ in range(FIRST_STEPS + STEPS):
        before = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - before)
    return statistics.quantiles(seconds[FIRST_STEPS:], n=10)[0]


def measure(num_ranks: int) -> dict[str, float]:
    """Fork the ranks; return the medians over them, and rank 0's descriptors."""
    from tests.helpers.forked_ranks import run_ranks

    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        results = Path(directory)
        run_ranks(num_ranks, partial(rank_program, results), results)
        found = [json.loads((results / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return {
        "wait": statistics.median(each["wait"] for each in found),
        "exchange": statistics.median(each["exchange"] for each in found),
        "cpu": statistics.median(each["cpu"] for each in found),
        "saving": statistics.median(each["saving"] for each in found),
        "rank 0": found[0]["descriptors"],
        "rank 1": found[1]["descriptors"],
    }


def main(sizes: list[int]) -> None:
    """Measure each size after the other."""
    print(json.dumps({size: measure(size) for size in sizes}))


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
