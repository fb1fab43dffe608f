"""Ranks of a run in this process: they take turns, by a clock of their own, and can be killed.

Only one rank runs at any moment, until it waits for another one. So a history is repeated exactly,
and a job can be killed before its n-th change of a file. Sleeping only moves the clock.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from foundation.errors import exit_status_of
from pretrain.distributed.messages import Worker

READS = ("os.listdir", "os.scandir")
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MOST_TURNS = 100_000  # of ranks that wait: more is a deadlock
LEAST_SLEEP = 5.0  # seconds, so that polling for minutes takes few turns


class Killed(BaseException):
    """Nothing of the job happens after it: no handler gets to do anything to the disk."""


class Left(BaseException):
    """A rank has ended its process with this status, without unwinding."""


@dataclass
class Clock:
    """What time it is where the run is: `wall` may jump, `monotonic` does not."""

    wall: float = 1.8e9
    monotonic: float = 0.0

    def pass_by(self, seconds: float) -> None:
        self.wall, self.monotonic = self.wall + seconds, self.monotonic + seconds


@dataclass
class End:
    """How a rank ended: its exit status and what it reported, or the error of a traceback."""

    status: int | None = None
    report: str = ""
    error: BaseException | None = None


@dataclass
class Job:
    """One job in `folder`. `faults` are folders whose files cannot be read or written, with errnos.

    `kill_before`: the change of a file, counted from 1, before which all ranks are killed.
    `meanwhile` is called once, before the `meanwhile_before`-th look at a file or change of one: it
    is what another process does.
    """

    folder: Path
    world_size: int = 1
    clock: Clock = field(default_factory=Clock)
    kill_before: int = 0
    meanwhile: Callable[[], object] = lambda: None
    meanwhile_before: int = 0
    faults: dict[Path, tuple[int, bool]] = field(default_factory=dict)
    delays: dict[str, int] = field(default_factory=dict)  # a worker's name -> ticks until a task
    observer: Callable[[str, Path, Path | None], None] = lambda event, path, target: None

    changes: int = 0
    looks: int = 0
    is_dead: bool = False
    rank: int = 0  # whose turn it is

    def __post_init__(self) -> None:
        self.ends = [End() for _ in range(self.world_size)]
        self.store = HashStore()
        self.handlers: dict[int, Any] = {}  # of SIGTERM, by rank
        self._boxes: dict[tuple[int, int, int], deque[Tensor]] = {}
        self._turns = [threading.Semaphore(0) for _ in range(self.world_size)]
        self._alive = set(range(self.world_size))
        self._prefix, self._scratch = f"{self.folder}/", f"{self.folder}/tmp/"
        self._tasks: dict[int, list[tuple[int, Worker, Callable[[], None]]]] = {}
        self._ticks = [0] * self.world_size

    def run(self, program: Callable[[int], int]) -> list[End]:
        """Run `program` on every rank; how each of them ended."""
        with self.is_current():
            if self.world_size == 1:
                self._run_rank(program, 0)
                return self.ends
            threads = [
                threading.Thread(target=self._in_turn, args=(program, rank), daemon=True)
                for rank in range(self.world_size)
            ]
            for thread in threads:
                thread.start()
            self._turns[0].release()
            for thread in threads:
                thread.join()
        return self.ends

    @contextlib.contextmanager
    def is_current(self) -> Iterator[None]:
        """Let what this process does in the block be this job's doing."""
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before

    def _in_turn(self, program: Callable[[int], int], rank: int) -> None:
        self._turns[rank].acquire()
        self._run_rank(program, rank)
        self._alive.discard(rank)
        if self._alive:
            self.rank = min(self._alive, key=lambda other: (other <= rank, other))
            self._turns[self.rank].release()

    def _run_rank(self, program: Callable[[int], int], rank: int) -> None:
        end = self.ends[rank]
        try:
            end.status = exit_status_of(
                lambda: program(rank), lambda text: setattr(end, "report", text)
            )
        except Killed:
            end.status = -signal.SIGKILL
        except Left as left:
            end.status, end.error = left.args[0], left if left.args[0] == 1 else None
        except BaseException as error:
            end.error = error

    # ----------------------------------------------------------------------------------- waiting

    def pass_turn(self) -> None:
        """Let the other ranks run until they wait, too."""
        me = self.rank
        others = self._alive - {me}
        if others and not self.is_dead:
            self.rank = min(others, key=lambda other: (other <= me, other))
            self._turns[self.rank].release()
            self._turns[me].acquire()
        if self.is_dead:
            raise Killed

    def kill(self) -> None:
        """Kill all ranks, of which this one runs."""
        self.is_dead = True
        raise Killed

    def sleep(self, seconds: float) -> None:
        self.clock.pass_by(max(seconds, LEAST_SLEEP))
        self.tick()
        self.pass_turn()

    def tick(self) -> None:
        """Count a step, or a pause, of this rank: tasks that were put off are done some later."""
        self._ticks[self.rank] += 1
        self.do_tasks(until=self._ticks[self.rank])

    def add_task(self, worker: Worker, name: str, task: Callable[[], None]) -> None:
        due = self._ticks[self.rank] + self.delays.get(name, 0)
        self._tasks.setdefault(self.rank, []).append((due, worker, task))
        if name not in self.delays:
            self.do_tasks(worker=worker)

    def do_tasks(self, until: int = 1 << 62, worker: Worker | None = None) -> None:
        tasks = self._tasks.get(self.rank, [])
        for entry in list(tasks):
            if entry[0] <= until and worker in (None, entry[1]) and entry in tasks:
                tasks.remove(entry)
                entry[2]()

    # ------------------------------------------------------------------------------- collectives

    def send(self, tensor: Tensor, target: int, tag: int = 0) -> None:
        self._boxes.setdefault((self.rank, target, tag), deque()).append(tensor.clone())

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        box = self._boxes.setdefault((source, self.rank, tag), deque())
        for turn in range(MOST_TURNS):
            if turn > 2:  # what goes on behind the loop goes on while it waits
                self.tick()
            if self.is_dead:
                raise Killed
            if box:
                tensor.copy_(box.popleft())
                return
            if source not in self._alive:
                raise RuntimeError("Connection closed by peer")  # as gloo says
            self.pass_turn()
        raise AssertionError(f"rank {self.rank} waits for rank {source} forever")

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        if self.rank != src:
            self.receive(tensor, src, tag=-1)
            return
        for rank in range(self.world_size):
            if rank != src:
                self.send(tensor, rank, tag=-1)

    def all_reduce(self, tensor: Tensor) -> None:
        own = tensor.clone()
        for rank in range(self.world_size):
            if rank != self.rank:
                self.send(own, rank, tag=-2)
        for rank in range(self.world_size):
            if rank != self.rank:
                part = torch.empty_like(own)
                self.receive(part, rank, tag=-2)
                tensor += part

    # ------------------------------------------------------------------------------------- files

    def on_file_event(self, event: str, arguments: Sequence[Any]) -> None:
        """Kill the job, or let the operation fail, if it is time for that."""
        path = arguments[0]
        if isinstance(path, bytes | os.PathLike):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            return
        if not path.startswith("/"):  # removed by a descriptor of its folder
            path = self._prefix + path
        if not path.startswith(self._prefix) or path.startswith(self._scratch):
            return
        is_change = event in CHANGES or (event == "open" and bool(arguments[2] & WRITING))
        self.looks += 1
        if self.looks == self.meanwhile_before:
            self.meanwhile()
        if is_change:
            self.count_change()
        for folder, (number, even_reads) in self.faults.items():
            if (even_reads or is_change) and f"{path}/".startswith(f"{folder}/"):
                raise OSError(number, os.strerror(number), path)
        if event == "os.rename":
            self.observer(event, Path(path), Path(os.fsdecode(arguments[1])))

    def count_change(self) -> None:
        if self.is_dead:
            raise Killed
        self.changes += 1
        if self.changes == self.kill_before:
            self.kill()


_current: Job | None = None
_is_hooked = False


def current_job() -> Job | None:
    return _current


def _hook(event: str, arguments: Sequence[Any]) -> None:
    if _current is not None and (event == "open" or event in CHANGES or event in READS):
        _current.on_file_event(event, arguments)


@contextlib.contextmanager
def jobs_in_this_process() -> Iterator[None]:
    """Let `Job.run` find ranks, clock, signals and threads of its own in the block."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hook)  # for good: a hook cannot be removed
        _is_hooked = True
    with contextlib.ExitStack() as stack:
        for home, name, own in _REPLACED:
            chosen = _in_job(own, getattr(home, name))
            stack.enter_context(mock.patch.object(home, name, chosen))
        yield


def _in_job(own: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """The job's own function where one runs, else the real one."""

    def chosen(*arguments: Any, **options: Any) -> Any:
        job = _current
        return real(*arguments, **options) if job is None else own(job, *arguments, **options)

    return chosen


def _nothing() -> None: ...


def _message(wait: Callable[[], object]) -> Any:
    """A message that was sent, or one that is received once it is waited for."""
    return types.SimpleNamespace(wait=wait)


def _leave(job: Job, status: int) -> None:
    raise Left(status)


_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (time, "sleep", Job.sleep),
    (time, "time", lambda job: job.clock.wall),
    (time, "monotonic", lambda job: job.clock.monotonic),
    (signal, "signal", lambda job, number, to: job.handlers.setdefault(job.rank, to)),
    (os, "_exit", _leave),
    (os, "fsync", lambda job, descriptor: job.count_change()),
    (dist, "get_rank", lambda job: job.rank),
    (dist, "get_world_size", lambda job: job.world_size),
    (dist, "isend", lambda job, *what, tag=0: _message(job.send(*what, tag) or _nothing)),
    (dist, "irecv", lambda job, *what, tag=0: _message(lambda: job.receive(*what, tag))),
    (dist, "broadcast", Job.broadcast),
    (dist, "all_reduce", Job.all_reduce),
    (distributed_c10d, "_get_default_store", lambda job: job.store),
    (Worker, "__init__", lambda job, worker, name: setattr(worker, "name", name)),
    (Worker, "add", lambda job, worker, task: job.add_task(worker, worker.name, task)),
    (Worker, "wait", lambda job, worker: job.do_tasks(worker=worker)),
    (Worker, "end", lambda job, worker: None),
)
