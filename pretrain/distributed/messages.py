"""Exchanges of small tensors in log2(ranks) rounds, and the threads that wait for them.

For tensors in host memory, gloo's own all-reduce and all-gather are rings: thousands of hops for a
few bytes. Here a rank sends one message and waits for one in each round, to and from ranks that are
1, 2, 4, 8 and so on away. PyTorch's flight recorder does not see messages between two ranks, so
`describe_waits` names the rank that this one waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

# A tag for the loop's exchanges and one for those in the background, since both go on at once.
# Nothing else in a run sends messages between two ranks, and torch's own tag is 0.
LOOP_TAG, BACKGROUND_TAG = 2, 1


@dataclass
class _Wait:
    """The rank that the exchanges with a tag wait for. The n-th is the same one on all ranks."""

    whose: str
    number: int = 0
    sender: int | None = None
    since: float = 0.0


_WAITS = {LOOP_TAG: _Wait("the loop"), BACKGROUND_TAG: _Wait("stop requests")}


@dataclass
class _Messages:
    """The messages of one collective."""

    tag: int
    sent: list[tuple[dist.Work | None, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _WAITS[self.tag].number += 1

    def swap(self, message: Tensor, distance: int, received: Tensor) -> None:
        """Send to the rank at this distance, and receive from the one as far the other way."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        wait, sender = _WAITS[self.tag], (rank - distance) % world_size
        wait.sender, wait.since = sender, time.monotonic()
        # Not for all rounds beforehand: gloo's connecting on demand waits for the other rank to
        # name this one as well, so ranks would wait for each other in a circle.
        arrival = dist.irecv(received, sender, tag=self.tag)
        work = dist.isend(message, (rank + distance) % world_size, tag=self.tag)
        self.sent.append((work, message))  # gloo reads the tensors later
        _finish(arrival)
        wait.sender = None

    def end(self) -> None:
        """Return when all that was sent may be freed."""
        for work, _ in self.sent:
            _finish(work)


def max_over_ranks(own: Tensor, tag: int = LOOP_TAG) -> Tensor:
    """Return the maximum of each element over all ranks, on every rank.

    By dissemination (Hensgen, Finkel, Manber 1988): in round k rank i sends what it knows to rank
    i + 2^k. A value that arrives twice changes nothing, so this is right for any number of ranks.
    """
    messages, known = _Messages(tag), own.contiguous()
    for k in range(num_rounds(dist.get_world_size())):
        received = torch.empty_like(known)
        messages.swap(known, 1 << k, received)
        known = torch.maximum(known, received)
    messages.end()
    return known


def gather_rows(own: Tensor) -> Tensor:
    """Return the ranks' tensors, of equal shapes, as rows in rank order.

    Before round k a rank has 2^k rows: its own and the next ranks' (Bruck et al. 1997).
    """
    world_size = dist.get_world_size()
    messages, known = _Messages(LOOP_TAG), own[None].contiguous()
    while len(known) < world_size:
        count = min(len(known), world_size - len(known))
        received = known.new_empty(count, *own.shape)
        messages.swap(known[:count], -len(known), received)
        known = torch.cat([known, received])
    messages.end()
    return known.roll(dist.get_rank(), 0)


def num_rounds(world_size: int) -> int:
    """Return how many rounds a collective has. Each connects a rank with two others at most."""
    return (world_size - 1).bit_length()


def describe_waits() -> list[str]:
    """Return a line for each collective that has started here and waits for a rank."""
    now = time.monotonic()
    return [
        f"waiting for rank {wait.sender} in exchange {wait.number} of {wait.whose}, "
        f"{now - wait.since:.0f} s"
        for wait in _WAITS.values()
        if wait.sender is not None
    ]


def _finish(work: dist.Work | None) -> None:
    assert work is not None  # None on ranks outside of the group, and all are in it
    work.wait()


class Worker:
    """A thread that runs one task after the other.

    Not a thread per task: once memory has run out, starting one fails or waits forever, and it
    costs more than an exchange. A daemon: a rank that fails need not wait for it before it ends.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, task: Callable[[], None]) -> None:
        """Run this task, which raises nothing, after the previous ones."""
        self._tasks.put(task)

    def wait(self) -> None:
        """Return when all tasks so far are done."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait()

    def end(self) -> None:
        """End the thread after the tasks so far; it can do nothing more."""
        self._tasks.put(None)

    def _run(self) -> None:
        for task in iter(self._tasks.get, None):
            task()


class BackgroundExchanges:
    """Exchanges while the rank computes. All ranks start the same ones, in the same order."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def start(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Start to ask which flags any rank has; the result waits for it, and raises its error."""
        self._worker = self._worker or Worker("exchanges")
        answer: Future[list[bool]] = Future()
        self._worker.add(partial(_exchange, flags, answer))
        return answer.result


def _exchange(flags: Sequence[bool], answer: Future[list[bool]]) -> None:
    try:
        own = torch.tensor(flags, dtype=torch.uint8)
        answer.set_result(max_over_ranks(own, BACKGROUND_TAG).bool().tolist())
    except BaseException as error:
        answer.set_exception(error)
