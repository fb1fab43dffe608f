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

A save, and an upload of what it has saved (`local_tier.py`), is a `Transfer`: each rank puts its
files into a destination, and reports them once they are there; rank 0 publishes when it has all
reports.
They go through the store where the ranks met: the threads use no collectives, and to look for files
of thousands of ranks is slow, because a network file system answers for a minute from its cache
that a name does not exist. Rank 0 asks the store how many reports there are, then takes all at
once.

Safetensors files are laid out first, copied to host memory, then written and hashed in one pass.
The safetensors library reads them: the header's length (8 bytes, little-endian), the header (JSON:
type, shape and offsets of each tensor), then the tensors' bytes without gaps. The library's own
writer would copy everything once more, and a hash would read the file back. Here both happen on the
way to the disk, without the interpreter lock, so that the loop keeps training.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from foundation.errors import CheckpointError, UserError, os_error_text, remedy_of
from foundation.records import json_text
from pretrain.checkpoint.destinations import Disk, TensorFile
from pretrain.checkpoint.directory import MEMORY, rank_file
from pretrain.checkpoint.marker import key_of, report_of
from pretrain.engines.engine import Engine, is_out_of_memory
from pretrain.model.lane_state import LaneState
from pretrain.state import TrainState

ALIGNMENT = 8
TYPE_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}

# Each tensor as pieces that follow each other along the first dimension.
Pieces = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Layout:
    """The file's header, and the offset of each tensor's bytes from the header's end."""

    header: bytes
    offsets: dict[str, int]
    num_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.num_bytes


def layout_of(tensors: Pieces) -> Layout:
    """Lay out the widest types first, so that every tensor is aligned; by name within a type."""
    entries: dict[str, dict[str, Any]] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name)):
        pieces = tensors[name]
        shape = [sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]]
        start, end = end, end + math.prod(shape) * pieces[0].element_size()
        offsets[name] = start
        entries[name] = {
            "dtype": TYPE_NAMES[pieces[0].dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json_text(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return Layout(len(text).to_bytes(8, "little") + text, offsets, end)


def copy_to_host(tensors: Pieces, layout: Layout, host: Tensor) -> None:
    """Copy every piece to its offset in `host`, a buffer of bytes; does not wait for a device."""
    for name, pieces in tensors.items():
        start = layout.offsets[name]
        for piece in pieces:
            end = start + piece.numel() * piece.element_size()
            view = host[start:end].view(piece.dtype).view(piece.shape)
            view.copy_(piece.detach(), non_blocking=True)
            start = end


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
        if isinstance(error, RankFailed):
            return error.problem
        if isinstance(error, OSError):
            return cls(os_error_text(error), remedy=remedy_of(error))
        if isinstance(error, CheckpointError):  # rank 0 does not see what a rank has written
            return cls(str(error), remedy="check the disk or file server")
        if is_out_of_memory(error):
            return cls(f"out of host memory ({error!r})"[:300], remedy="free host memory")
        text = (str(error) if isinstance(error, UserError) else "") or repr(error)
        return cls(text, may_pass=False, remedy="")


class RankFailed(Exception):
    """Another rank has failed, so that its files will not come."""

    def __init__(self, problem: SaveProblem) -> None:
        self.problem = problem


POLL_SECONDS = 0.02
FAILURE = "failure"
_LENGTH_BYTES = 8
Report = dict[str, Any]


class RankReports:
    """The reports of one transfer, which all ranks give the same `name`, unlike that of any other.

    `store` is by default that of the ranks' process group; one rank alone has its own.
    """

    def __init__(self, name: str, rank: int, num_ranks: int, store: Store | None = None) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        if store is None:
            store = distributed_c10d._get_default_store() if num_ranks > 1 else HashStore()
        self._store = PrefixStore(f"save/{name}", store)

    def post(self, report: Mapping[str, Any], pieces: Mapping[str, Any]) -> None:
        """Report what this rank has written; does not wait for rank 0."""
        content = encoded(report, pieces)
        self._store.set(str(self.rank), cast("str", content))  # bytes are as good
        self._store.add("count", 1)

    def post_failure(self, problem: SaveProblem) -> None:
        """Report, unless this is rank 0, that there will be no report of this rank."""
        if self.rank:
            problem = replace(problem, text=f"rank {self.rank}: {problem.text}")
            with contextlib.suppress(RuntimeError):  # rank 0 is gone, as every rank will notice
                self._store.set(FAILURE, json_text(asdict(problem)))

    def collect(self, while_waiting: Callable[[], None]) -> list[Report]:
        """Return the reports of all ranks, in their order (rank 0); `while_waiting` may raise.

        RankFailed as soon as one has posted a failure.
        """
        while self._store.add("count", 0) < self.num_ranks:
            while_waiting()
            if self._store.check([FAILURE]):
                raise RankFailed(SaveProblem(**json.loads(self._store.get(FAILURE))))
            time.sleep(POLL_SECONDS)
        return decoded(self._store.multi_get([str(rank) for rank in range(self.num_ranks)]))

    def clear(self) -> None:
        """Remove from the store what has been collected: a request for each rank (rank 0)."""
        for name in (*map(str, range(self.num_ranks)), "count"):
            self._store.delete_key(name)


def encoded(report: Mapping[str, Any], pieces: Mapping[str, Any]) -> bytes:
    """Return a rank's message: report and pieces as JSON, compressed, after the report's length."""
    own, others = (
        zlib.compress(json_text(each, sort_keys=True).encode(), level=1)
        for each in (report, pieces)
    )
    return len(own).to_bytes(_LENGTH_BYTES, "little") + own + others


def decoded(contents: Sequence[bytes]) -> list[Report]:
    """Return the reports with their `pieces`; equal ones are read once, and the same object."""
    known: dict[bytes, Any] = {}
    reports = []
    for content in contents:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        if (pieces := content[end:]) not in known:
            known[pieces] = json.loads(zlib.decompress(pieces))
        report = json.loads(zlib.decompress(content[_LENGTH_BYTES:end]))
        reports.append({**report, "pieces": known[pieces]})
    return reports


class HostBuffer:
    """Host memory that saves reuse: to allocate and pin it takes longer than to fill it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def with_bytes(self, num_bytes: int) -> Tensor:
        """Return at least `num_bytes`: what the last call returned if it is large enough."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(0)  # freed first: both may not fit
            pinned = self.device.type == "cuda"
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer


@dataclass(frozen=True)
class RankFile:
    """The live tensors that a rank saves, and how its file lays them out."""

    tensors: Pieces
    layout: Layout

    @classmethod
    def of(cls, fragments: Pieces, state: TrainState, lane_state: LaneState) -> RankFile:
        """The file of these fragments, of memories in lane order and the random-number state."""
        memories = [memory for memory in state.memories if memory is not None]
        parts = [lane_state.named(memory) for memory in memories]
        names = parts[0] if parts else ()
        tensors = {**fragments, **{MEMORY + name: [part[name] for part in parts] for name in names}}
        tensors["random.cpu"] = [torch.get_rng_state()]
        if torch.cuda.is_available():
            tensors["random.cuda"] = [torch.cuda.get_rng_state()]
        return cls(tensors, layout_of(tensors))

    def pieces(self, rank: int) -> dict[str, Any]:
        """Return what the rank reports of the pieces of parameters in it."""
        elements = {
            key: sum(piece.numel() for piece in pieces)
            for key, pieces in self.tensors.items()
            if "|" in key
        }
        return report_of(elements, rank)


def owned_fragments(engine: Engine) -> Pieces:
    """Return the fragments that this rank saves."""
    return {
        key_of(fragment.name, fragment.start, kind): [value]
        for fragment in engine.fragments()
        if fragment.owned
        for kind, value in fragment.values.items()
    }


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
        "world_size": 1,
        "config": config,
        **more,
    }


class Transfer(ABC):
    """A rank's part in bringing a checkpoint to a destination, which `run` does in a thread.

    `_put` brings the rank's files there and returns what it reports; rank 0's then `_publish`es.
    """

    def __init__(self, step: int, reports: RankReports) -> None:
        self.step, self._reports = step, reports
        self._written, self._ended = threading.Event(), threading.Event()
        self._canceled = threading.Event()
        self.is_published = False  # as far as this rank knows: rank 0 knows first
        self._problem: SaveProblem | None = None

    @abstractmethod
    def _put(self) -> tuple[Report, Mapping[str, Any]]: ...

    @abstractmethod
    def _publish(self, reports: list[Report]) -> None: ...

    def run(self) -> None:
        try:
            # Its report tells rank 0 that all this rank's files are there.
            self._reports.post(*self._put())
            self._written.set()
            if self._reports.rank == 0:
                self._publish(self._reports.collect(self.check))
                self.is_published = True
                self._reports.clear()
        except Exception as error:  # the loop asks for it, and every rank then raises it
            self._problem = SaveProblem.of(error)
            self._reports.post_failure(self._problem)
        finally:
            self._end()

    def _end(self) -> None:
        """Also after an error: whoever waits must wake up and find it."""
        self._written.set()
        self._ended.set()

    @property
    def is_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def problem(self) -> SaveProblem | None:
        """Why this rank has failed, as far as it has; waits for nothing."""
        return self._problem

    def wait(self) -> SaveProblem | None:
        """Return when this rank's file is there and, on rank 0, all are published; else why not."""
        (self._written if self._reports.rank else self._ended).wait()
        return None if self.is_published else self._problem

    def stop(self) -> None:
        """Let it put and publish nothing more."""
        self._canceled.set()

    def cancel(self) -> None:
        """Stop it; returns when it has ended."""
        self.stop()
        self._ended.wait()

    def check(self) -> None:
        """Raise SaveCanceled once it is to stop."""
        if self._canceled.is_set():
            raise SaveCanceled


class Save(Transfer):
    """The transfer of the live tensors of a rank's file to a disk.

    `index` is the checkpoint's without its lists, `report` what this rank adds to them.
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
        self._computed: torch.cuda.Event | None = None  # all that will be saved
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
        # What was live is not kept until the file is written, or the next save.
        self._rank_file = RankFile({}, layout)
        return host


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
