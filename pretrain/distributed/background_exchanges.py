"""Threads for what happens behind what a rank computes, and which flags any rank has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import torch

from pretrain.distributed.rounds import BACKGROUND_TAG, largest_of_ranks


class Worker:
    """A thread that makes one task after the other, from the construction on.

    Not a thread per task: once memory has run out, starting one fails or waits forever, and it
    costs more than an exchange. A daemon: a rank that fails need not wait for it before it ends.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, task: Callable[[], None]) -> None:
        """Make this task, which raises nothing, after those before."""
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
    """Exchanges behind what the rank computes. All ranks start the same ones, in the same order."""

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
        answer.set_result(largest_of_ranks(own, BACKGROUND_TAG).bool().tolist())
    except BaseException as error:
        answer.set_exception(error)
