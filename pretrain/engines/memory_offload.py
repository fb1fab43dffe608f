"""Lane memories of slots that are not at work, in host memory.

With gradient accumulation each slot remembers its own lanes, and one slot is at work at a time. What it remembers comes
to the device for its forward pass; what it remembers after it goes back, into pinned memory and on a stream of its own,
while the next slot runs. Every copy is a new one: a checkpoint may still be reading an older.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.engines.engine import Memory


class MemoryOffload:
    """Where memories live between the forward passes of their slots: on the device unless `is_on`."""

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self._device = device
        self._is_on = is_on
        self._stream = torch.cuda.Stream(device) if is_on and device.type == "cuda" else None
        self._stored: dict[
            int, torch.cuda.Event
        ] = {}  # by slot: the moment at which its last memory has left
        self._leaving: tuple[Memory, torch.cuda.Event] | None = None

    def fetch(self, slot: int, memory: Memory | None) -> Memory | None:
        """The slot's memory on the device, for its forward pass."""
        if memory is None or not self._is_on:
            return memory
        if slot in self._stored:
            torch.cuda.current_stream(self._device).wait_event(self._stored[slot])
        return tuple(part.to(self._device, non_blocking=True) for part in memory)

    def store(self, slot: int, memory: Memory) -> Memory:
        """The memory where it stays until the slot's next pass. The device goes on: `wait` before it is read here."""
        if not self._is_on:
            return memory
        if self._stream is None:
            return tuple(part.clone() for part in memory)
        current = torch.cuda.current_stream(self._device)
        if self._leaving is not None:
            # The one before left while this slot ran. Freed in the order of this stream, its room is there again at
            # once, however far ahead of the device the loop is.
            current.wait_event(self._leaving[1])
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            copies = tuple(_pinned_copy(part) for part in memory)
        copied = self._stored[slot] = torch.cuda.Event()
        copied.record(self._stream)
        self._leaving = memory, copied
        return copies

    def wait(self) -> None:
        """Return when all that was stored can be read."""
        if self._stream is not None:
            self._stream.synchronize()


def _pinned_copy(part: Tensor) -> Tensor:
    # Torch keeps pinned memory for the next such copy, and gives none out while a copy from or to it is under way.
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
