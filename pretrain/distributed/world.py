"""The ranks of a run and the collectives that the loop needs. Rank variables are read only here.

How many files and connections a rank may have open, and how few its collectives need.

Rank 0 serves the store where ranks meet: a connection of every rank. By default gloo connects
every rank with every other before the first collective, which takes as many again on each rank.

Where the ranks of a run meet: a store that rank 0 serves, and how long they wait for each other.

With MASTER_PORT the port is given. With PRETRAIN_PORT_FILE the kernel gives rank 0 one that is free
at that moment, and the file, which all ranks see, tells the others: neighbors on a host can not
choose the same one.

Small tensors in host memory take log2(ranks) rounds: gloo's own all-reduce and all-gather are
rings, thousands of hops for a few bytes. Here a rank sends one message and waits for one in each
round, to and from ranks that are 1, 2, 4, 8 and so on away. PyTorch's flight recorder does not see
messages between two ranks, so `describe_waits` names the rank that this one waits for.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import pad

from foundation.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OtherVersionError,
    TrainingError,
    UndoneError,
    UnreadableError,
    UserError,
)
from foundation.files import await_text, write_text
from foundation.records import from_json, to_json
from foundation.retry import StorageError
from pretrain.distributed.rank_device import device_of_rank, use_device
from pretrain.distributed.slurm_variables import PORT_FILE_VARIABLE, number_in, rank_numbers

# A tag for the loop's, one for those behind it, since both go on at once. Nothing else in a run
# sends messages between two ranks, and torch's own tag is 0.
LOOP_TAG, BACKGROUND_TAG = 2, 1


@dataclass
class _Wait:
    """For whom the collectives with a tag wait. The n-th is the same one on all ranks."""

    whose: str
    number: int = 0
    sender: int | None = None
    since: float = 0.0


_WAITS = {LOOP_TAG: _Wait("the loop"), BACKGROUND_TAG: _Wait("stop requests")}


@dataclass
class _Messages:
    """The messages of one collective."""

    tag: int
    sent: list[tuple[dist.Work | None, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _WAITS[self.tag].number += 1

    def swap(self, message: Tensor, distance: int, received: Tensor) -> None:
        """Send to the rank at this distance, and receive from the one as far the other way."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        wait, sender = _WAITS[self.tag], (rank - distance) % world_size
        wait.sender, wait.since = sender, time.monotonic()
        # Not for all rounds beforehand: gloo's connecting on demand waits for the other rank to
        # name this one as well, so ranks would wait for each other in a circle.
        arrival = dist.irecv(received, sender, tag=self.tag)
        work = dist.isend(message, (rank + distance) % world_size, tag=self.tag)
        self.sent.append((work, message))  # gloo reads the tensors later
        _finish(arrival)
        wait.sender = None

    def end(self) -> None:
        """Return when all that was sent may be freed."""
        for work, _ in self.sent:
            _finish(work)


def largest_of_ranks(own: Tensor, tag: int = LOOP_TAG) -> Tensor:
    """Return the largest value of each element over all ranks, on every rank.

    By dissemination (Hensgen, Finkel, Manber 1988): in round k rank i sends what it knows to rank
    i + 2^k. A value that arrives twice changes nothing, so this is right for any number of ranks.
    """
    messages, known = _Messages(tag), own.contiguous()
    for distance in (1 << each for each in range(rounds_of(dist.get_world_size()))):
        received = torch.empty_like(known)
        messages.swap(known, distance, received)
        known = torch.maximum(known, received)
    messages.end()
    return known


def rows_of_ranks(own: Tensor, tag: int = LOOP_TAG) -> Tensor:
    """Return the tensors of all ranks, of equal shapes, as rows in rank order.

    Before round k a rank has those of 2^k ranks: its own and the next ones' (Bruck et al. 1997).
    """
    world_size = dist.get_world_size()
    messages, known = _Messages(tag), own[None].contiguous()
    while len(known) < world_size:
        count = min(len(known), world_size - len(known))
        received = known.new_empty(count, *own.shape)
        messages.swap(known[:count], -len(known), received)
        known = torch.cat([known, received])
    messages.end()
    return known.roll(dist.get_rank(), 0)


def rounds_of(world_size: int) -> int:
    """Return how many rounds a collective has. Each connects a rank with two others at most."""
    return (world_size - 1).bit_length()


def describe_waits() -> list[str]:
    """Return a line for each collective that has started here and waits for a rank."""
    now = time.monotonic()
    return [
        f"waiting for rank {wait.sender} in exchange {wait.number} of {wait.whose}, "
        f"{now - wait.since:.0f} s"
        for wait in _WAITS.values()
        if wait.sender is not None
    ]


def _finish(work: dist.Work | None) -> None:
    assert work is not None  # None on ranks outside of the group, and all are in it
    work.wait()


class Worker:
    """A thread that makes one task after the other, from the construction on.

    Not a thread per task: once memory has run out, starting one fails or waits forever, and it
    costs more than an exchange. A daemon: a rank that fails need not wait for it before it ends.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def add(self, task: Callable[[], None]) -> None:
        """Make this task, which raises nothing, after those before."""
        self._tasks.put(task)

    def wait(self) -> None:
        """Return when all tasks so far are done."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait()

    def end(self) -> None:
        """End the thread after the tasks so far; it can do nothing more."""
        self._tasks.put(None)

    def _run(self) -> None:
        for task in iter(self._tasks.get, None):
            task()


class BackgroundExchanges:
    """Exchanges behind what the rank computes. All ranks start the same ones, in the same order."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def start(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Start to ask which flags any rank has; the result waits for it, and raises its error."""
        self._worker = self._worker or Worker("exchanges")
        answer: Future[list[bool]] = Future()
        self._worker.add(partial(_exchange, flags, answer))
        return answer.result


def _exchange(flags: Sequence[bool], answer: Future[list[bool]]) -> None:
    try:
        own = torch.tensor(flags, dtype=torch.uint8)
        answer.set_result(largest_of_ranks(own, BACKGROUND_TAG).bool().tolist())
    except BaseException as error:
        answer.set_exception(error)


LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
LARGEST_MESH = 64  # ranks
MOST_DESCRIPTORS = 1 << 16


def prepare_descriptors(world_size: int) -> None:
    """Let this process open as many files and connections as it may, up to MOST_DESCRIPTORS.

    From more than LARGEST_MESH ranks on, gloo connects two ranks when a collective first needs it:
    those are a few per rank, and two more where their number doubles. Smaller worlds connect all at
    once, because then a rank that dies before the first collective is noticed at once.
    """
    if world_size > LARGEST_MESH:
        os.environ.setdefault(LAZY_VARIABLE, "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


LOOPBACK = "127.0.0.1"  # where ranks of one machine meet
# Until all ranks have come, and in collectives of a run without a watchdog.
WITHOUT_WATCHDOG = datetime.timedelta(minutes=30)
_LONGEST_SUSPENSION = datetime.timedelta(days=7)


def collective_timeout(watchdog_timeout_seconds: float) -> datetime.timedelta:
    """How long a collective may take: the watchdog of a rank, which writes stacks, ends it before.

    The margin is as long as Slurm may suspend a job: the clocks of collectives run on meanwhile,
    that of the watchdog does not.
    """
    if not watchdog_timeout_seconds:
        return WITHOUT_WATCHDOG
    return datetime.timedelta(seconds=watchdog_timeout_seconds) + _LONGEST_SUSPENSION


def meeting_store(rank: int, world_size: int) -> Store:
    """The store of all ranks, from the environment; UserError if rank 0 does not come."""
    file = os.environ.get(PORT_FILE_VARIABLE)
    if file is None and not 0 <= (port := number_in(os.environ, "MASTER_PORT")) < 1 << 16:
        raise ConfigError(f"found MASTER_PORT={port}, expected a port below 65536; correct it")
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's agent
    if file is None and os.environ["MASTER_ADDR"] == LOOPBACK and not is_served:
        return _loopback_store(rank, world_size)
    if file is None:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=WITHOUT_WATCHDOG))
        # An agent that restarts its ranks keeps the store, with the addresses of those that died.
        # Agents of several nodes may count their restarts differently.
        one_agent = is_served and os.environ.get("GROUP_WORLD_SIZE") == "1"
        return PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store) if one_agent else store
    return _store_by_file(Path(file), rank, world_size)


def _loopback_store(rank: int, world_size: int) -> Store:
    """The ranks' meeting point on this machine; torch's own would listen on every interface."""
    port, listening = number_in(os.environ, "MASTER_PORT"), None
    if rank == 0:
        try:
            listening = socket.create_server((LOOPBACK, port), backlog=world_size).detach()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"MASTER_PORT={port}: {reason}; choose another port") from None
    return TCPStore(
        LOOPBACK,
        port,
        world_size,
        is_master=listening is not None,
        timeout=WITHOUT_WATCHDOG,
        master_listen_fd=listening,
    )


def _store_by_file(file: Path, rank: int, world_size: int) -> Store:
    port = 0 if rank == 0 else _port_in(file)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        world_size,
        is_master=rank == 0,
        timeout=WITHOUT_WATCHDOG,
        wait_for_workers=False,
    )
    if rank == 0:
        write_text(file, f"{store.port}\n")
    os.environ["MASTER_PORT"] = str(store.port)  # as without the file
    return store


def _port_in(file: Path) -> int:
    try:
        return int(await_text(file, WITHOUT_WATCHDOG.total_seconds()))
    except TimeoutError:
        raise UserError(
            f"{file}: rank 0 has not written its port for {WITHOUT_WATCHDOG}; see its log"
        ) from None


T = TypeVar("T")
LARGEST_MESSAGE_BYTES = 1 << 26
ONLY_OURS = "make sure that all ranks run the same code, and that no other process can reach them"
_KINDS = {
    kind.__name__: kind
    for kind in (
        *(UserError, ConfigError, DataError, TrainingError),
        *(CheckpointError, UnreadableError, StorageError, OtherVersionError, UndoneError),
    )
}


@dataclass(frozen=True)
class World:
    """This process among the ranks. `device` is the accelerator of `local_rank`, else the CPU."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_from_environment(environment: Mapping[str, str]) -> World:
    """Read the rank variables, and which device is this rank's."""
    rank, world_size, local_rank = rank_numbers(environment)
    return World(rank, world_size, local_rank, device_of_rank(environment, local_rank))


def ranks_on_this_node() -> int:
    """Return how many ranks share this node's cores, descriptors and memory."""
    all_ranks = os.environ.get("WORLD_SIZE", "1")
    return max(1, number_in(os.environ, "LOCAL_WORLD_SIZE", all_ranks))


# What rank variables were before `init_world` set them for DeepSpeed.
_FORMER_VARIABLES: dict[str, str | None] = {}


def init_world(watchdog_timeout_seconds: float = 0.0) -> World:
    """Join the other ranks. Collectives on CPU tensors use gloo, those on GPU tensors NCCL.

    A watchdog ends ranks that hang before their collectives time out.
    """
    former = {name: value for name, value in _FORMER_VARIABLES.items() if value is not None}
    world = world_from_environment({**os.environ, **former})
    if world.world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE={world.world_size} needs MASTER_ADDR and MASTER_PORT; "
            "start ranks with 'launcher local'"
        )
    # DeepSpeed reads these even for one process, the last one as the index of its device.
    index = world.local_rank if world.device.index is None else world.device.index
    own = {"RANK": world.rank, "WORLD_SIZE": world.world_size, "LOCAL_RANK": index}
    for name, value in own.items():
        _FORMER_VARIABLES.setdefault(name, os.environ.get(name))
        os.environ[name] = str(value)
    use_device(world.device)
    if dist.is_initialized():
        return world
    prepare_descriptors(world.world_size)
    timeout = collective_timeout(watchdog_timeout_seconds)
    # Groups that others create without a timeout (DeepSpeed's) have this one: torch has no public
    # setting, and its 10 minutes for NCCL are shorter than a watchdog's.
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)
    if world.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    else:
        store = meeting_store(world.rank, world.world_size)
    connect(world.device, store, world.rank, world.world_size, timeout)
    return world


def connect(
    device: torch.device, store: Store, rank: int, world_size: int, timeout: datetime.timedelta
) -> None:
    """Make the process group of all ranks that meet in the store."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        # NCCL then connects now, on this device, and not at the first collective.
        device_id=device if on_gpu else None,
    )


def destroy_process_group() -> None:
    """Close the process group, so that no rank keeps waiting for one that ended."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in _FORMER_VARIABLES.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    _FORMER_VARIABLES.clear()


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank. It uses gloo, so the accelerator does not wait."""
    return on_any_rank([flag])[0]


def on_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Return `any_rank` of several flags, in one collective."""
    return largest_of_ranks(torch.tensor(flags, dtype=torch.uint8)).bool().tolist()


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, on every rank; `tensor` itself is not changed."""
    total = tensor.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


def exchange_parts(
    parts: torch.Tensor, counts: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send consecutive parts of a vector to ranks 0, 1 and so on, `counts[i]` elements to rank i.

    Returns what this rank gets, in rank order: `received[i]` elements from rank i.
    """
    if len(counts) == 1:
        return parts
    found = parts.new_empty(sum(received))
    dist.all_to_all_single(found, parts, list(received), list(counts))
    return found


def broadcast_value(value: T, kind: Any) -> T:
    """Return, on every rank, the small value of the type `kind` that rank 0 passes.

    `kind` is any type that `from_json` knows. Values travel as JSON: torch's own collectives for
    objects unpickle, and with that execute, what a peer sends.
    """
    if dist.get_world_size() == 1:
        return value
    message = _message_of(value)
    size = torch.tensor([message.numel()])
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        message = torch.empty(_checked_size(0, size), dtype=torch.uint8)
    dist.broadcast(message, src=0)
    return _value_of(0, message, kind)


def gather_values(value: T, kind: Any) -> list[T]:
    """Return the small values of all ranks, in rank order, as `broadcast_value` passes them."""
    if dist.get_world_size() == 1:
        return [value]
    message = _message_of(value)
    sizes = rows_of_ranks(torch.tensor([message.numel()]))
    lengths = [_checked_size(rank, size) for rank, size in enumerate(sizes)]
    gathered = rows_of_ranks(pad(message, (0, max(lengths) - message.numel())))
    return [_value_of(rank, gathered[rank][:size], kind) for rank, size in enumerate(lengths)]


def gather_found(value: T | None, kind: Any) -> list[T]:
    """Return the values of the ranks that have one, in rank order.

    As nearly always none has, that is one exchange of a flag.
    """
    if not any_rank(value is not None):
        return []
    return [each for each in gather_values(value, kind | None) if each is not None]


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Run the block on every rank; if any raises a UserError or an OSError, every rank raises the
    first one."""
    problem, cause = None, None
    try:
        yield
    except (UserError, OSError) as error:
        problem, cause = Problem.of(error), error
    for found in gather_found(problem, Problem):
        raise cause if cause is not None and found == problem else found.error()


def of_main(world: World, read: Callable[[], T], kind: Any) -> T:
    """Return, or raise, on every rank what `read` does on rank 0; it is of the type `kind`."""
    value: Any = None
    with raise_on_all_ranks():
        value = read() if world.is_main else None
    return broadcast_value(value, kind)


@dataclass(frozen=True)
class Problem:
    """A UserError, or an OSError with its number, as ranks tell each other about it."""

    kind: str
    message: str
    number: int | None = None
    path: str | None = None

    @classmethod
    def of(cls, error: UserError | OSError) -> Problem:
        if isinstance(error, OSError) and error.errno is not None:
            name = error.filename  # or a descriptor
            path = os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None
            return cls(OSError.__name__, error.strerror or "", error.errno, path)
        kinds = (each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS)
        return cls(next(kinds, UserError.__name__), str(error))

    def error(self) -> UserError | OSError:
        """Return the same error, with the same meaning and exit status as on its rank."""
        if self.number is not None:
            return OSError(self.number, self.message, self.path)
        return _KINDS.get(self.kind, UserError)(self.message)


def _message_of(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(to_json(value)).encode()), dtype=torch.uint8)


def _checked_size(rank: int, size: torch.Tensor) -> int:
    if not 0 < (found := int(size)) <= LARGEST_MESSAGE_BYTES:
        raise UserError(
            f"rank {rank} announced a message of {found:,} bytes, expected 1 to "
            f"{LARGEST_MESSAGE_BYTES:,}; {ONLY_OURS}"
        )
    return found


def _value_of(rank: int, message: torch.Tensor, kind: Any) -> Any:
    try:
        return from_json(kind, json.loads(bytes(message.numpy())))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"rank {rank} sent no message of this program; {ONLY_OURS}") from None
