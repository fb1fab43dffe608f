"""One rank's part of one save, in a thread: copy to host memory, write and hash, and on rank 0 publish.

The loop waits for the copy at most, and only before the next update: forward and backward passes change nothing that is
saved. The GPU copies on a stream of its own into pinned memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.errors import UserError
from data_pipeline.files import write_json
from pretrain.checkpoint import directory as files
from pretrain.checkpoint.tensor_files import Layout, Pieces, copy_to_host, layout_of, write_file
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine
from pretrain.state import TrainState

PUBLISH_SECONDS = (
    600.0  # all ranks have written: how long their files may take to become visible to rank 0
)


class SaveCanceled(Exception):
    """The save was given up by the loop."""


class HostBuffers:
    """Host memory that is kept from save to save, since to allocate and pin it takes longer than to fill it."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers: dict[str, Tensor] = {}

    def bytes_for(self, name: str, num_bytes: int) -> Tensor:
        """At least `num_bytes` of memory; what the last call with this name returned is used again."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=self._pinned
            )
        return buffer


@dataclass(frozen=True)
class RankFile:
    """A file to be written, and the live tensors that go into it."""

    name: str
    tensors: Pieces
    layout: Layout


def files_of_rank(engine: Engine, state: TrainState) -> list[RankFile]:
    """What this rank saves: its fragments; the memories of all its slots in lane order with its random numbers."""
    named = {"engine": _engine_pieces(engine), "state": _state_pieces(state)}
    return [
        RankFile(files.rank_file(kind, engine.world.rank), tensors, layout_of(tensors))
        for kind, tensors in named.items()
    ]


class Save(threading.Thread):
    """Writes `rank_files` and the rank's `report`; `publish` then runs on rank 0, when all other ranks' are there."""

    def __init__(
        self,
        step: int,
        partial: Path,
        rank_files: list[RankFile],
        report: dict[str, Any],
        buffers: HostBuffers,
        world: World,
        publish: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(name="save", daemon=True)
        self.partial = partial
        self.step = step
        self._rank_files = rank_files
        self._report = report
        self._buffers = buffers
        self._world = world
        self._publish = publish
        self._begun = _event_on(world.device)
        self._copied, self._written, self._abandoned = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._problem: Exception | None = None

    def wait_for_copy(self) -> None:
        """Return when the live tensors may change again."""
        self._copied.wait()

    def wait_for_files(self) -> str:
        """Return when this rank's files are on disk; what went wrong, or nothing."""
        self._written.wait()
        return self._words()

    def wait_for_publication(self) -> str:
        """Return when the checkpoint counts, on rank 0, or at once on others; what went wrong, or nothing."""
        self.join(PUBLISH_SECONDS)
        if self.is_alive():
            self.cancel()
            return (
                f"{self.partial} did not show the files of all ranks within {PUBLISH_SECONDS:.0f} s"
            )
        return self._words()

    @property
    def has_failed(self) -> bool:
        """Whether something has gone wrong on this rank so far; waits for nothing."""
        return self._problem is not None

    def cancel(self) -> None:
        """Write and publish nothing more; returns when the thread has ended."""
        self._abandoned.set()
        self.join()

    def run(self) -> None:
        try:
            host = self._copy()
            self._copied.set()
            self._write(host)
            self._written.set()
            if self._world.is_main:
                self._publish(self._end_if_abandoned)
        except Exception as error:  # the loop asks for it, and every rank then raises it
            self._problem = error
        finally:
            self._copied.set()
            self._written.set()

    def _copy(self) -> list[Tensor]:
        with _own_stream(self._world.device, self._begun):
            host = [
                self._buffers.bytes_for(each.name, each.layout.num_bytes)
                for each in self._rank_files
            ]
            for each, buffer in zip(self._rank_files, host, strict=True):
                copy_to_host(each.tensors, each.layout, buffer)
        return host

    def _write(self, host: list[Tensor]) -> None:
        self.partial.mkdir(parents=True, exist_ok=True)
        described = {
            each.name: write_file(
                self.partial / each.name, each.layout, buffer, self._end_if_abandoned
            )
            for each, buffer in zip(self._rank_files, host, strict=True)
        }
        write_json(
            self.partial / files.rank_file("rank", self._world.rank),
            {**self._report, "files": described},
        )

    def _end_if_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise SaveCanceled

    def _words(self) -> str:
        error = self._problem
        if error is None:
            return ""
        return (str(error) if isinstance(error, (OSError, UserError)) else "") or repr(error)


def _engine_pieces(engine: Engine) -> Pieces:
    return {
        f"{fragment.name}|{fragment.start}|{kind}": [value]
        for fragment in engine.fragments()
        if fragment.owned
        for kind, value in fragment.values.items()
    }


def _state_pieces(state: TrainState) -> Pieces:
    begun = [memory for memory in state.memories if memory is not None]
    levels = {f"memory.{level:03d}": slots for level, slots in enumerate(zip(*begun, strict=True))}
    return {**levels, **dict(_random_state())}


def _random_state() -> Iterator[tuple[str, list[Tensor]]]:
    yield "random.cpu", [torch.get_rng_state()]
    if torch.cuda.is_available():
        yield "random.cuda", [torch.cuda.get_rng_state()]


def _event_on(device: torch.device) -> torch.cuda.Event | None:
    """The moment on the device up to which everything that will be copied has been computed."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextlib.contextmanager
def _own_stream(device: torch.device, begun: torch.cuda.Event | None) -> Iterator[None]:
    """Copies in the block run beside the loop's work; they are done when the block ends."""
    if begun is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_event(begun)
        yield
        stream.synchronize()
