"""Which flags any rank has, in log2(ranks) rounds: by dissemination (Hensgen, Finkel, Manber 1988).

In round k rank i sends what it knows to rank i + 2^k and takes what rank i - 2^k knows. A flag that
arrives twice changes nothing, so this is right for any number of ranks. gloo's all-reduce of a few
bytes is a ring of 2 (ranks - 1) hops. PyTorch's flight recorder does not see these messages, so
what a step has to wait for remains an all-reduce.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch
import torch.distributed as dist

_TAG = 1  # nothing else in a run sends messages between two ranks, and torch's own tag is 0


class BackgroundExchanges:
    """Exchanges behind what the rank computes. All ranks start the same ones, in the same order.

    One follows the other in a thread that the first one starts: a new thread for each costs a step
    more than the exchange does.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Sequence[bool], Future[list[bool]]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Start to ask which flags any rank has; the result waits for it, and raises its error."""
        if self._thread is None:
            # A daemon, so that a rank that fails need not wait for the others before it ends.
            self._thread = threading.Thread(target=self._run, name="exchanges", daemon=True)
            self._thread.start()
        answer: Future[list[bool]] = Future()
        self._asked.put((flags, answer))
        return answer.result

    def _run(self) -> None:
        while True:
            flags, answer = self._asked.get()
            try:
                answer.set_result(_exchange(flags))
            except BaseException as error:
                answer.set_exception(error)


def rounds_of(world_size: int) -> int:
    """Return how many rounds an exchange has. Each connects a rank with two others at most."""
    return (world_size - 1).bit_length()


def _exchange(flags: Sequence[bool]) -> list[bool]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    known = torch.tensor(flags, dtype=torch.uint8)
    sent: list[tuple[dist.Work | None, torch.Tensor]] = []  # gloo reads the tensors later
    for distance in (1 << each for each in range(rounds_of(world_size))):
        received = torch.empty_like(known)
        # Not for all rounds beforehand: gloo's connecting on demand waits for the other rank to
        # name this one as well, so ranks would wait for each other in a circle.
        arrival = dist.irecv(received, (rank - distance) % world_size, tag=_TAG)
        sent.append((dist.isend(known, (rank + distance) % world_size, tag=_TAG), known))
        _wait(arrival)
        known = known | received
    for work, _ in sent:
        _wait(work)
    return known.bool().tolist()


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # None on ranks outside of the group, and all are in it
    work.wait()
