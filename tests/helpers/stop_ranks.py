"""Gloo ranks that agree on stops and exchange values, and what each found."""

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foundation.errors import DataError
from pretrain.distributed.collectives import (
    any_rank,
    gather_values,
    on_any_rank,
    raise_on_all_ranks,
)
from pretrain.distributed.messages import describe_waits, gather_rows, max_over_ranks
from pretrain.distributed.rendezvous import LAZY_VARIABLE
from pretrain.distributed.world import World, init_world
from pretrain.recovery.stop_requests import Agreement, StopRequest, StopRequested
from tests.helpers.forked_ranks import run_ranks

ASKED_AT = 3
MOST_ASKED = 3  # ranks


def agree(world: World) -> list[object]:
    """Ask one rank after the other to stop; the steps at which this one did, and wrong flags."""
    found: list[object] = []
    for asked in range(min(world.world_size, MOST_ASKED)):
        stop, step, stopping = StopRequest(), 0, False
        while not stopping and step < 9:
            is_asked = step == ASKED_AT and asked == world.rank
            if asked % 2 and is_asked:
                os.kill(os.getpid(), signal.SIGTERM)
            answer = stop.ask(lambda: Agreement(save_failed=world.rank == asked))  # noqa: B023
            if not asked % 2 and is_asked:
                os.kill(os.getpid(), signal.SIGTERM)  # too late for this step
            # What a step itself asks, before it wants the answer.
            inside = on_any_rank([False, world.rank == world.world_size - 1])
            agreed = answer()
            stopping = agreed.stop
            if [agreed.save_failed, agreed.save_again, *inside] != [True, False, False, True]:
                found.append([*astuple(agreed), *inside])
            step += 1
        found.append(step - 1)
        stop.restore_handlers()
    return found


def collect(world: World) -> dict[str, object]:
    """What this rank gets of the others' values and errors, and how many messages it sent."""
    sent, send = [0], dist.isend

    def counted(*arguments: Any, **options: Any) -> dist.Work | None:
        sent[0] += 1
        return send(*arguments, **options)

    dist.isend = counted
    values = gather_values("r" * world.rank, str)
    sums = gather_rows(torch.tensor([[world.rank, 2]])).sum(0).tolist()
    largest = max_over_ranks(torch.tensor([world.rank, -world.rank])).tolist()
    of_values, sent[0] = sent[0], 0
    with raise_on_all_ranks():
        pass
    of_no_error, raised = sent[0], ""
    try:
        with raise_on_all_ranks():
            if world.rank:
                raise DataError(f"of rank {world.rank}")
    except DataError as error:
        raised = str(error)
    dist.isend = send
    messages = [of_values, of_no_error]
    return {"values": values, "numbers": [sums, largest], "messages": messages, "raised": raised}


def agree_and_collect(world: World) -> list[object]:
    """Return what `agree` and `collect` do."""
    return [agree(world), collect(world)]


def wait_for_the_last(world: World) -> list[str]:
    """Return what a rank waits for while the last one is late."""
    seen: list[str] = []
    if world.rank == world.world_size - 1:
        time.sleep(1.0)
    else:
        watch = threading.Timer(0.5, lambda: seen.extend(describe_waits()))
        watch.start()
    any_rank(False)
    return [*seen, *describe_waits()]


def stop_evaluation(world: World) -> list[int]:
    """Ask the last rank to stop in the second of two evaluations; the batches that this one makes
    of each."""
    stop, made = StopRequest(), []
    for asked_at in (None, ASKED_AT):
        batch = 0
        with contextlib.suppress(StopRequested):
            for batch in range(9):
                stop.raise_if_requested()
                if batch == asked_at and world.rank == world.world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                on_any_rank([False])  # what a batch itself may ask
        made.append(batch)
    stop.restore_handlers()
    return made


def lose_a_rank(world: World) -> str:
    """Return what a rank raises after rank 1 has ended."""
    stop = StopRequest()
    stop.ask()()
    if world.rank == 1:
        os._exit(0)
    try:
        stop.ask()()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def rank_program(program: Callable[[World], object], results: Path, lazy: str) -> int:
    """Write what the program returns on this rank."""
    os.environ[LAZY_VARIABLE] = lazy
    world = init_world()
    found = program(world)
    (results / f"{world.rank}.json").write_text(json.dumps(found))
    if program is not lose_a_rank:
        gather_values(0, int)  # none leaves before all have finished
    return 0


def run(num_ranks: int, program: Callable[[World], object], lazy: str = "0") -> list[Any]:
    """What the program returned on each rank; None where it did not return."""
    with tempfile.TemporaryDirectory(prefix="stops-") as directory:
        results = Path(directory)
        run_ranks(num_ranks, partial(rank_program, program, results, lazy), results)
        paths = [results / f"{rank}.json" for rank in range(num_ranks)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def found_by_ranks() -> dict[str, list[Any]]:
    """Small worlds that connect at once, and a larger one on demand."""
    return {
        **{str(size): run(size, agree_and_collect) for size in (2, 3, 5)},
        "16 on demand": run(16, agree_and_collect, lazy="1"),
        "evaluation": run(3, stop_evaluation),
        "late": run(3, wait_for_the_last),
        "lost": run(3, lose_a_rank, lazy="1"),
    }
