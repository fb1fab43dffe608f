"""Lane memories of inactive slots in host memory (`engine.offload_memories`).

With gradient accumulation each slot has the memories of its own lanes, and one slot is active at a
time. Its memory comes to the device for its forward pass. The new memory returns to pinned host
memory on a separate stream, while the next slot runs. Every copy is a new tensor: a checkpoint may
still be reading an older one.
"""

import torch
from torch import Tensor

from pretrain.model.memory import Memory


class MemoryOffload:
    """Moves memories between device and host; without `is_on` they stay on the device."""

    def __init__(self, device: torch.device, is_on: bool) -> None:
        self._device = device
        self._is_on = is_on
        self._stream = torch.cuda.Stream(device) if is_on and device.type == "cuda" else None
        # Slot -> event after the copy of its last memory to the host.
        self._stored: dict[int, torch.cuda.Event] = {}
        self._leaving: tuple[Memory, torch.cuda.Event] | None = None

    def fetch(self, slot: int, memory: Memory | None) -> Memory | None:
        """Return the slot's memory on the device, for its forward pass."""
        if memory is None or not self._is_on:
            return memory
        if slot in self._stored:
            torch.cuda.current_stream(self._device).wait_event(self._stored[slot])
        return tuple(part.to(self._device, non_blocking=True) for part in memory)

    def store(self, slot: int, memory: Memory) -> Memory:
        """Return the memory to keep until the slot's next pass; `wait` before the host reads it."""
        if not self._is_on:
            return memory
        if self._stream is None:
            return tuple(part.clone() for part in memory)
        current = torch.cuda.current_stream(self._device)
        if self._leaving is not None:
            # `_leaving` keeps the previous slot's memory on the device until its copy has ended,
            # which ran while this slot computed. After this wait the allocator may reuse that
            # memory in stream order. So at most three slots' memories are on the device, however
            # far the loop runs ahead.
            current.wait_event(self._leaving[1])
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            copies = tuple(_pinned_copy(part) for part in memory)
        copied = self._stored[slot] = torch.cuda.Event()
        copied.record(self._stream)
        self._leaving = memory, copied
        return copies

    def wait(self) -> None:
        """Return when everything that was stored can be read."""
        if self._stream is not None:
            self._stream.synchronize()


def _pinned_copy(part: Tensor) -> Tensor:
    # Torch's pinned-memory allocator reuses blocks, but never one that a copy in progress still
    # needs.
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
