"""Stop requests: a signal to any rank becomes one decision of all ranks, at a step's end or between
two batches of an evaluation."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType

import torch.distributed as dist

from pretrain.distributed.rounds import BackgroundExchanges
from pretrain.distributed.world import any_rank

# NCCL may catch SIGUSR1, and Slurm's notice before a time limit can be any of these: so all three
# mean the same.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequested(Exception):
    """Raised on every rank by `StopRequest.raise_if_requested`."""


class StopRequest:
    """Remembers a stop signal. A second SIGINT, say from an impatient user, ends the process."""

    def __init__(self) -> None:
        self._requested = False
        self._count = 0
        self._exchanges = BackgroundExchanges()
        self._answer: Callable[[], Sequence[bool]] = list  # to the last `raise_if_requested`
        self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}

    @property
    def count(self) -> int:
        """How many signals this rank was sent."""
        return self._count

    def requested_on_any_rank(self) -> bool:
        """Whether any rank was asked to stop. A collective: all ranks call it at the same step."""
        return any_rank(self._requested)

    def ask(self, flags: Callable[[], Sequence[bool]]) -> Callable[[], list[bool]]:
        """Start to ask whether any rank was asked to stop, and which flags any has: in one
        exchange, behind what the ranks compute meanwhile. The result waits for the answer.

        With more ranks than one, the flags are those of now; one rank is asked when it wants the
        answer.
        """
        if dist.get_world_size() == 1:
            return lambda: [self._requested, *flags()]
        return self._exchanges.start([self._requested, *flags()])

    def raise_if_requested(self) -> None:
        """Raise StopRequested, on every rank, if any was asked to stop before the last call.

        A collective, which goes on behind what the ranks compute until the next call.
        """
        if any(self._answer()):
            raise StopRequested
        self._answer = self.ask(list)

    def restore_handlers(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True
        self._count += 1
