"""One rank's part of a save, in a thread: copy to host memory, write and hash; rank 0 publishes.

    loop     save() | forward, backward, ... | wait_for_copy | update | forward ...       | finish()
    thread          | copy ................. | write, hash, fsync ..... | publish (rank 0) |

While the thread copies, weights, moments, EMA and the tensors of lane memories must not change.
Forward and backward passes change none of them: gradients are not saved, and a new memory is a new
tensor. So the loop needs no lock and waits only before the update. Counters, cursors and settings
are read before the thread starts. On a GPU the copy runs on a separate stream, into pinned memory.

A thread is enough because hashing and writing release the interpreter lock; a process would need
the tensors in shared memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.directory import MEMORY, rank_file
from pretrain.checkpoint.disk import Disk, TensorFile
from pretrain.checkpoint.pieces import piece_key, piece_report
from pretrain.checkpoint.tensor_layout import (
    HostBuffer,
    Layout,
    SplitTensors,
    copy_to_host,
    lay_out,
)
from pretrain.checkpoint.transfer import RankReports, Report, Transfer
from pretrain.engines.engine import Engine
from pretrain.model.memory import MemoryLayout
from pretrain.state import TrainState


@dataclass(frozen=True)
class RankFile:
    """The live tensors that a rank saves, and how its file lays them out."""

    tensors: SplitTensors
    layout: Layout

    @classmethod
    def of(
        cls, fragments: SplitTensors, state: TrainState, memory_layout: MemoryLayout
    ) -> RankFile:
        """Return the file of fragments, memories in lane order and the random-number state."""
        memories = [memory for memory in state.memories if memory is not None]
        parts = [memory_layout.named(memory) for memory in memories]
        names = parts[0] if parts else ()
        tensors = {**fragments, **{MEMORY + name: [part[name] for part in parts] for name in names}}
        tensors["random.cpu"] = [torch.get_rng_state()]
        if torch.cuda.is_available():
            tensors["random.cuda"] = [torch.cuda.get_rng_state()]
        return cls(tensors, lay_out(tensors))

    def pieces(self, rank: int) -> dict[str, Any]:
        """Return the rank's report of the parameters' elements in the file."""
        elements = {
            key: sum(piece.numel() for piece in pieces)
            for key, pieces in self.tensors.items()
            if "|" in key
        }
        return piece_report(elements, rank)


def owned_fragments(engine: Engine) -> SplitTensors:
    """Return the fragments that this rank saves."""
    return {
        piece_key(fragment.name, fragment.start, kind): [value]
        for fragment in engine.fragments()
        if fragment.owned
        for kind, value in fragment.values.items()
    }


def new_index(
    run_id: str, config: dict[str, Any], engine: Engine, state: TrainState, **more: Any
) -> dict[str, Any]:
    """Return the index without the ranks' reports; fields in `more` are added or replace others.

    Call it before the thread starts: engine and state change while it writes.
    """
    return {
        "run": run_id,
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "optimizer_steps": engine.optimizer_step_count(),
        "loss_scale": engine.loss_scaler.to_tree() if engine.loss_scaler is not None else None,
        "world_size": 1,
        "config": config,
        **more,
    }


class Save(Transfer):
    """The transfer of a rank's live tensors to a disk.

    `index` lacks the ranks' reports; `report` is this rank's. Rank 0 calls `then` when the
    checkpoint is published.
    """

    def __init__(
        self,
        disk: Disk,
        rank_file: RankFile,
        index: dict[str, Any],
        report: dict[str, Any],
        reports: RankReports,
        buffer: HostBuffer,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(index["step"], reports)
        self._disk, self._rank_file = disk, rank_file
        self._index, self._report = index, report
        self._buffer, self._then = buffer, then
        # The GPU reaches this event when all kernels that write the saved tensors are done.
        self._computed: torch.cuda.Event | None = None
        if buffer.device.type == "cuda":
            self._computed = torch.cuda.Event()
            self._computed.record(torch.cuda.current_stream(buffer.device))
        self._copied = threading.Event()

    def wait_for_copy(self) -> None:
        """Return when the live tensors may change again."""
        self._copied.wait()

    def _put(self) -> tuple[Report, Mapping[str, Any]]:
        layout, pieces = self._rank_file.layout, self._rank_file.pieces(self._reports.rank)
        body = self._copy()
        self._copied.set()
        content = TensorFile(layout.header, body.numpy().data[: layout.num_bytes])
        written = self._disk.put(self.step, rank_file(self._reports.rank), content, self.check)
        return {**self._report, **written}, pieces

    def _publish(self, reports: list[Report]) -> None:
        self._disk.publish(self._index, reports)
        self._then()

    def _end(self) -> None:
        self._copied.set()
        super()._end()

    def _copy(self) -> Tensor:
        layout = self._rank_file.layout
        with _separate_stream(self._buffer.device, self._computed):
            host = self._buffer.with_bytes(layout.num_bytes)
            copy_to_host(self._rank_file.tensors, layout, host)
        # Drop the references to live tensors, so that old memories are freed before the file is
        # written.
        self._rank_file = RankFile({}, layout)
        return host


@contextlib.contextmanager
def _separate_stream(device: torch.device, computed: torch.cuda.Event | None) -> Iterator[None]:
    """Run the block's copies on a separate stream after `computed`, and wait for them."""
    if computed is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_event(computed)
        yield
        stream.synchronize()
