"""Stop requests: a signal to any rank becomes one decision of all ranks at a step boundary."""

from __future__ import annotations

import signal
from types import FrameType

from pretrain.distributed.world import any_rank, on_any_rank

# NCCL may catch SIGUSR1 and Slurm's own notice before a time limit can be any of these, so all three mean the same.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequest:
    """Remembers that a stop was asked for. A second SIGINT ends the process at once, as one at a keyboard expects."""

    def __init__(self) -> None:
        self._asked = False
        self._previous = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}

    def requested_on_any_rank(self) -> bool:
        """Whether any rank was asked to stop; a collective, so every rank must call it at the same step."""
        return any_rank(self._asked)

    def requested_or_failed(self, failed: bool) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, and whether any says `failed`: both in one exchange."""
        requested, any_failed = on_any_rank([self._asked, failed])
        return requested, any_failed

    def restore_handlers(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True
