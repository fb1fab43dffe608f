"""What ranks decide together at a step's end, or between two batches of an evaluation: whether to
stop, and what users ask for."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from itertools import takewhile
from types import FrameType

import torch.distributed as dist

from foundation.interruption import ONE_PRESS_SECONDS
from pretrain.distributed.collectives import any_rank, on_any_rank
from pretrain.distributed.messages import BackgroundExchanges
from pretrain.rundir.events import ASK, Requested
from pretrain.rundir.history import STARTS_AND_ENDS, find_events
from pretrain.rundir.ledger import Ledger

# Slurm's notice before a time limit can be any of the first three: SIGUSR1 is missing because NCCL
# may catch it. SIGHUP comes from a closed terminal, and stays ignored if nohup ignores it.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class Agreement:
    """The flags of a rank in a step; once agreed, a flag is set if it is on any rank."""

    stop: bool = False  # a signal asks for it
    save_failed: bool = False  # the rank's part of the save in progress failed
    save_again: bool = False  # storage failed, and it is time for another try
    upload: bool = False  # rank 0 decided to upload the last save to the mirror
    save: bool = False  # a user asks rank 0 for a save
    evaluate: bool = False  # a user asks rank 0 for an evaluation

    def agreed(self) -> Agreement:
        """Return what all ranks agree on. A collective."""
        return Agreement(*on_any_rank(astuple(self)))


class UserRequests:
    """Takes the requests of `launcher signal` since the latest start or end of the training.

    Those from before its construction have come while the ranks were starting.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._signals: list[int] = []  # since the last `take`
        self.previous = signal.signal(ASK, lambda number, _: self._signals.append(number))
        events = ledger.read()
        since = takewhile(lambda event: not isinstance(event, STARTS_AND_ENDS), reversed(events))
        waiting = find_events([*since], Requested)
        self._num_taken = len(find_events(events, Requested)) - len(waiting)
        self._signals += [ASK] * len(waiting)

    def take(self) -> set[str]:
        """Return what was asked for since the last call: save or evaluate."""
        if not self._signals:
            return set()
        self._signals.clear()
        requests = [event.request for event in find_events(self.ledger.read(), Requested)]
        new, self._num_taken = requests[self._num_taken :], len(requests)
        return set(new) or {"save"}  # a signal without an event was sent by hand


class StopRequested(Exception):
    """Raised on every rank by `StopRequest.raise_if_requested`."""


class StopRequest:
    """Remembers stop signals. A second SIGINT, say from an impatient user, ends the process."""

    def __init__(self) -> None:
        self.count = 0  # signals that this rank was sent
        self._interrupted = -math.inf  # when the last SIGINT came
        self._exchanges = BackgroundExchanges()
        self._answer: Callable[[], Agreement] = Agreement  # to what `raise_if_requested` asked last
        self._previous = {
            number: signal.signal(number, self._handle)
            for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }

    def requested_on_any_rank(self) -> bool:
        """Return whether any rank was asked to stop. A collective."""
        return any_rank(self.count > 0)

    def ask(self, own: Callable[[], Agreement] = Agreement) -> Callable[[], Agreement]:
        """Start to agree on flags; `own` returns this rank's. Return a function that waits for it.

        Several ranks exchange their present flags while they compute. A single rank's flags are
        read when the function is called.
        """

        def flags() -> Agreement:
            return replace(own(), stop=self.count > 0)

        if dist.get_world_size() == 1:
            return flags
        answer = self._exchanges.start(astuple(flags()))
        return lambda: Agreement(*answer())

    def raise_if_requested(self) -> None:
        """Raise StopRequested, on every rank, if any was asked to stop before the last call.

        A collective, which continues while the ranks compute until the next call.
        """
        if self._answer().stop:
            raise StopRequested
        self._answer = self.ask()

    def restore_handlers(self) -> None:
        """Put back the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            before, self._interrupted = self._interrupted, time.monotonic()
            if self._interrupted - before < ONE_PRESS_SECONDS:
                return
            if self.count:
                raise KeyboardInterrupt
        self.count += 1
