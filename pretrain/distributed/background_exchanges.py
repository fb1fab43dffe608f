"""Which flags any rank has, asked behind what the ranks compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch

from pretrain.distributed.rounds import BACKGROUND_TAG, largest_of_ranks


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
                own = torch.tensor(flags, dtype=torch.uint8)
                answer.set_result(largest_of_ranks(own, BACKGROUND_TAG).bool().tolist())
            except BaseException as error:
                answer.set_exception(error)
