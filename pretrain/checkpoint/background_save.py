"""One rank's part of a save, in a thread: copy to host memory, write and hash; rank 0 publishes.

    loop     save() | forward, backward, ... | wait_for_copy | update | forward ...       | finish()
    thread          | copy ................. | write, hash, fsync ..... | publish (rank 0) |

While the thread copies, weights, moments, EMA and the tensors of lane memories must not change. The
loop needs no lock for that: forward and backward passes change none of them (gradients are not
saved, and a memory is replaced by a new tensor), so it only has to wait before the update.
Counters, cursors and settings are read before that. On a GPU the copy runs on a
separate stream, into pinned memory.

It is a thread rather than a process because hashing and writing release the interpreter lock, and
nothing has to be shared. It uses no collectives: those of the loop would be interleaved with them
in another order on each rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.errors import CheckpointError, UserError, os_error_text, remedy_of
from pretrain.checkpoint.directory import MEMORY, rank_file
from pretrain.checkpoint.pieces import key_of, report_of
from pretrain.checkpoint.rank_reports import RankReports, Report
from pretrain.checkpoint.tensor_files import (
    FilePart,
    Layout,
    Pieces,
    copy_to_host,
    layout_of,
    part_of_file,
    whole_file,
    write_file,
)
from pretrain.distributed.world import World
from pretrain.engines.engine import Engine, is_out_of_memory
from pretrain.model.lane_state import LaneState
from pretrain.state import TrainState

# After all ranks have written: how long rank 0 may take to write index and marker.
PUBLISH_SECONDS = 600.0


class SaveCanceled(Exception):
    """The loop canceled the save."""


@dataclass(frozen=True)
class SaveProblem:
    """Why a rank's part of a save failed."""

    text: str
    may_pass: bool = True  # storage failed, so a later save may succeed
    remedy: str = "free disk space"

    @classmethod
    def of(cls, error: Exception) -> SaveProblem:
        if isinstance(error, OSError):
            return cls(os_error_text(error), remedy=remedy_of(error))
        if isinstance(error, CheckpointError):  # rank 0 does not see what a rank has written
            return cls(str(error), remedy="check the disk or file server")
        if is_out_of_memory(error):
            return cls(f"out of host memory ({error!r})"[:300], remedy="free host memory")
        text = (str(error) if isinstance(error, UserError) else "") or repr(error)
        return cls(text, may_pass=False, remedy="")


class HostBuffers:
    """Host memory that saves reuse: to allocate and pin it takes longer than to fill it."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers: dict[str, Tensor] = {}

    def bytes_for(self, name: str, num_bytes: int) -> Tensor:
        """Return at least `num_bytes`: the buffer of the last call with this name if it fits."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            self._buffers.pop(name, None)  # free it first: both may not fit
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._buffers[name] = buffer
        return buffer


@dataclass(frozen=True)
class RankFile:
    """A file to be written by these `ranks`, and the live tensors of this one that go into it."""

    name: str
    tensors: Pieces
    layout: Layout
    ranks: Sequence[int]


def files_of_rank(
    engine: Engine, state: TrainState, lane_state: LaneState, node: Sequence[int]
) -> list[RankFile]:
    """Return what this rank saves: fragments, memories in lane order, random-number state.

    The ranks of its `node` save the last two in one file.
    """
    fragments: Pieces = {
        key_of(fragment.name, fragment.start, kind): [value]
        for fragment in engine.fragments()
        if fragment.owned
        for kind, value in fragment.values.items()
    }
    return files_of(fragments, state, lane_state, engine.world.rank, node)


def files_of(
    fragments: Pieces, state: TrainState, lane_state: LaneState, rank: int, node: Sequence[int]
) -> list[RankFile]:
    """Return the files of `rank` that hold these fragments and the state."""
    memories = [memory for memory in state.memories if memory is not None]
    parts = [lane_state.named(memory) for memory in memories]
    slots = {MEMORY + name: [part[name] for part in parts] for name in (parts[0] if parts else ())}
    random = {"random.cpu": [torch.get_rng_state()]}
    if torch.cuda.is_available():
        random["random.cuda"] = [torch.cuda.get_rng_state()]
    named: dict[str, tuple[Pieces, Sequence[int]]] = {
        "engine": (fragments, (rank,)),
        "state": ({**slots, **random}, node),
    }
    return [
        RankFile(rank_file(kind, ranks[0]), tensors, layout_of(tensors), ranks)
        for kind, (tensors, ranks) in named.items()
    ]


def new_index(
    run_id: str, config: dict[str, Any], engine: Engine, state: TrainState, **more: Any
) -> dict[str, Any]:
    """Return the index without its lists, of one rank unless there is `more`.

    Before the save is written, as engine and state will have changed then.
    """
    return {
        "run": run_id,
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "optimizer_steps": engine.optimizer_step_count(),
        "loss_scale": engine.loss_scaler.to_tree() if engine.loss_scaler is not None else None,
        "validation_loss": None,
        "rebuild": None,
        "world_size": 1,
        "config": config,
        **more,
    }


def pieces_in(rank_files: list[RankFile], rank: int) -> dict[str, Any]:
    """Return what the rank reports of the pieces in its files."""
    elements = {
        key: sum(piece.numel() for piece in pieces)
        for each in rank_files
        if each.name.startswith("engine-")
        for key, pieces in each.tensors.items()
    }
    return report_of(elements, rank)


class Save:
    """A task that writes `rank_files` and adds the rank's to the `reports`.

    Rank 0 then publishes with all. Rank 0 has made `partial`: a rank that made one itself would
    write where no other rank looks, under a lost mount.
    """

    def __init__(
        self,
        step: int,
        partial: Path,
        rank_files: list[RankFile],
        report: dict[str, Any],
        buffers: HostBuffers,
        world: World,
        reports: RankReports,
        publish: Callable[[list[Report]], None],
    ) -> None:
        self.partial = partial
        self.step = step
        self._rank_files = rank_files
        self._report = report
        self._pieces = pieces_in(rank_files, world.rank)
        self._buffers = buffers
        self._world = world
        self._reports, self._publish = reports, publish
        self._computed = _event_on(world.device)
        self._copied, self._written = threading.Event(), threading.Event()
        self._ended = threading.Event()
        self._canceled = threading.Event()
        self.is_published = False  # as far as this rank knows: rank 0 knows first
        self._problem: SaveProblem | None = None

    def wait_for_copy(self) -> None:
        """Return when the live tensors may change again."""
        self._copied.wait()

    def wait_for_files(self) -> SaveProblem | None:
        """Return when this rank's files are on disk, or with the problem."""
        self._written.wait()
        return self._problem

    def wait_for_publication(self) -> SaveProblem | None:
        """Return when rank 0 has published (on other ranks at once), or with the problem."""
        if is_late := not self._ended.wait(PUBLISH_SECONDS):
            self.cancel()
        if self.is_published:  # maybe late, while its end was awaited
            return None
        late = SaveProblem(f"{self.partial}: not published after {PUBLISH_SECONDS:.0f} s")
        return late if is_late else self._problem

    @property
    def has_failed(self) -> bool:
        """Whether this rank has failed so far; waits for nothing."""
        return self._problem is not None

    def cancel(self) -> None:
        """Write and publish nothing more; returns when that is so."""
        self._canceled.set()
        self._ended.wait()

    def run(self) -> None:
        try:
            for each in self._rank_files:
                if len(each.ranks) > 1:  # now, so that nobody waits for it once all have copied
                    self._reports.post_header(each.layout.header, each.ranks)
            host = self._copy()
            self._copied.set()
            self._write(host)
            self._written.set()
            if self._world.is_main:
                self._publish(self._reports.collect(self._raise_if_canceled))
                self.is_published = True
                self._reports.clear()
        except Exception as error:  # the loop asks for it, and every rank then raises it
            self._problem = SaveProblem.of(error)
        finally:
            # Also after an error: whoever waits must wake up and find it.
            self._copied.set()
            self._written.set()
            self._ended.set()

    def _copy(self) -> list[Tensor]:
        with _separate_stream(self._world.device, self._computed):
            host = [
                self._buffers.bytes_for(each.name, each.layout.num_bytes)
                for each in self._rank_files
            ]
            for each, buffer in zip(self._rank_files, host, strict=True):
                copy_to_host(each.tensors, each.layout, buffer)
        # What was live is not kept until the files are written, or the next save.
        self._rank_files = [replace(each, tensors={}) for each in self._rank_files]
        return host

    def _write(self, host: list[Tensor]) -> None:
        described = {
            each.name: write_file(
                self.partial / each.name, self._part_of(each), buffer, self._raise_if_canceled
            )
            for each, buffer in zip(self._rank_files, host, strict=True)
        }
        # Last: it tells rank 0 that all this rank writes is on disk.
        self._reports.post({**self._report, "files": described}, self._pieces)

    def _part_of(self, file: RankFile) -> FilePart:
        """What this rank writes of the file."""
        if len(file.ranks) == 1:
            return whole_file(file.layout)
        headers = self._reports.headers(file.ranks, self._raise_if_canceled)
        return part_of_file(headers, self._world.rank)

    def _raise_if_canceled(self) -> None:
        if self._canceled.is_set():
            raise SaveCanceled


def _event_on(device: torch.device) -> torch.cuda.Event | None:
    """Return an event of the loop's stream, after which all that will be saved is computed."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


@contextlib.contextmanager
def _separate_stream(device: torch.device, computed: torch.cuda.Event | None) -> Iterator[None]:
    """Run the block's copies after `computed`, alongside the loop's work, and wait for them."""
    if computed is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_event(computed)
        yield
        stream.synchronize()
