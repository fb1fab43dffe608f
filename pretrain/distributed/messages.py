"""Exchanges of small tensors in log2(ranks) rounds, and a thread that can wait for them.

For tensors in host memory, gloo's all-reduce and all-gather are rings: among thousands of ranks,
thousands of hops for a few bytes. Here a rank sends one message and receives one in each round, to
and from the ranks at distance 1, 2, 4, 8 and so on. PyTorch's flight recorder does not record
messages between two ranks, so `describe_waits` names the rank that this one waits for.
"""

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

# The loop and the background thread exchange messages at the same time; tags keep these apart.
# Nothing else in a run sends messages between two ranks, and torch's default tag is 0.
LOOP_TAG, BACKGROUND_TAG = 2, 1


@dataclass
class _Wait:
    """The rank that the exchanges with a tag wait for. Exchange n is the same one on all ranks."""

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
        """Send `message` to the rank at this distance ahead; receive from the one as far behind."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        wait, sender = _WAITS[self.tag], (rank - distance) % world_size
        wait.sender, wait.since = sender, time.monotonic()
        # Receives are not posted for all rounds in advance. With connections on demand, gloo blocks
        # in the first call that names a rank until that rank names this one too; ranks that name
        # others in different orders would wait for each other in a circle.
        arrival = dist.irecv(received, sender, tag=self.tag)
        work = dist.isend(message, (rank + distance) % world_size, tag=self.tag)
        self.sent.append((work, message))  # keeps the tensor: gloo may read it later
        _finish(arrival)
        wait.sender = None

    def end(self) -> None:
        """Wait until gloo has sent all messages, so that their tensors may be freed."""
        for work, _ in self.sent:
            _finish(work)


def max_over_ranks(own: Tensor, tag: int = LOOP_TAG) -> Tensor:
    """Return the maximum of each element over all ranks, on every rank.

    By dissemination (Hensgen, Finkel, Manber 1988): in round k rank i sends its maximum so far to
    rank i + 2^k. A value that arrives twice does not change a maximum, so this is correct also for
    numbers of ranks that are no powers of two.
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

    Before round k a rank has 2^k rows: its own, then the following ranks' (Bruck et al. 1997).
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
    """Return how many rounds an exchange has. In each, a rank uses at most two connections."""
    return (world_size - 1).bit_length()


def describe_waits() -> list[str]:
    """Return a line for each exchange that waits for another rank now."""
    now = time.monotonic()
    return [
        f"waiting for rank {wait.sender} in exchange {wait.number} of {wait.whose}, "
        f"{now - wait.since:.0f} s"
        for wait in _WAITS.values()
        if wait.sender is not None
    ]


def _finish(work: dist.Work | None) -> None:
    assert work is not None  # torch returns None only on ranks outside the group
    work.wait()


class Worker:
    """A thread that runs one task after the other.

    A thread for each task would cost more than an exchange; and once memory has run out, starting
    one fails or waits forever. It is a daemon, so that a rank that fails can exit without it.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, task: Callable[[], None]) -> None:
        """Queue a task. It must not raise."""
        self._tasks.put(task)

    def wait(self) -> None:
        """Wait until all tasks queued so far are done."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait()

    def end(self) -> None:
        """End the thread after the tasks queued so far. Add no more."""
        self._tasks.put(None)

    def _run(self) -> None:
        for task in iter(self._tasks.get, None):
            task()


class BackgroundExchanges:
    """Exchanges in a thread while the rank computes. All ranks start them in the same order."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def start(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Start an exchange of flags; return a function that waits for it.

        The function returns, for each flag, whether any rank has set it, or raises the exchange's
        error.
        """
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
