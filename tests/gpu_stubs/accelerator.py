"""A CPU that DeepSpeed takes for an asynchronous device, and what it asks of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class Stream:
    """Work that is done at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.waits = 0

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait_stream(self, _: object) -> None:
        self.waits += 1

    wait_event = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """One that has happened when it is recorded."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, _: object = None) -> None: ...

    def wait(self, _: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


class CountingAccelerator(CPU_Accelerator):
    """Install it with `deepspeed.accelerator.set_accelerator` before `deepspeed.initialize`.

    `counts` has how often each of synchronize, set_device, stream and empty_cache was called. Of
    `visible` devices any other one is refused, as CUDA does.
    """

    def __init__(self, visible: int = 8) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.devices: list[int] = []  # that were set
        self._visible = visible
        self._stream = Stream()

    def is_synchronized_device(self) -> bool:
        return False

    def device_count(self) -> int:
        return self._visible

    def set_device(self, device_index: int | torch.device) -> None:
        if isinstance(device_index, torch.device):  # ZeRO-3's; a CPU has no index
            device_index = device_index.index or 0
        self._check(device_index)
        self.counts["set_device"] += 1
        self.devices.append(int(device_index))

    def current_device(self) -> int:
        return self.devices[-1] if self.devices else 0

    def device_name(self, device_index: int | str | None = None) -> str:
        if device_index is not None:
            self._check(device_index)
        return "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        self.counts["synchronize"] += 1

    def empty_cache(self) -> None:
        self.counts["empty_cache"] += 1

    @property
    def Stream(self) -> type[Stream]:
        return Stream

    @property
    def Event(self) -> type[Event]:
        return Event

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        self.counts["stream"] += 1
        yield stream

    def current_stream(self, device_index: int | None = None) -> Stream:
        return self._stream

    default_stream = current_stream

    def _check(self, device_index: int | str) -> None:
        if not 0 <= int(device_index) < self._visible:
            raise RuntimeError("CUDA error: invalid device ordinal")


def reduce_as_on_a_gpu() -> CountingAccelerator:
    """Let this process' engines sum gradients as on a GPU, for good; returns what counts waits."""
    from deepspeed.accelerator import set_accelerator

    from pretrain.engines import deepspeed_engine

    accelerator, derived = CountingAccelerator(), deepspeed_engine.deepspeed_settings
    set_accelerator(accelerator)
    deepspeed_engine.deepspeed_settings = lambda run, ranks, steps, _: derived(
        run, ranks, steps, on_gpu=True
    )
    torch.Tensor.record_stream = lambda *_: None
    return accelerator
