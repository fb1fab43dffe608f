"""Collectives for flags, tensors, small values and errors.

Values are sent as JSON. torch's collectives for objects unpickle what a peer sends, and a pickle
can execute any code.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from foundation.errors import ConfigError, DataError, UserError
from foundation.typed_values import from_json, to_tree
from pretrain.distributed.messages import gather_rows, max_over_ranks
from pretrain.distributed.world import World
from pretrain.errors import (
    CheckpointError,
    OtherVersionError,
    StorageError,
    TrainingError,
    UndoneError,
    UnreadableError,
)

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


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank. Uses gloo, so no GPU has to be synchronized."""
    return on_any_rank([flag])[0]


def on_any_rank(flags: Sequence[bool]) -> list[bool]:
    """Return `any_rank` of several flags, in one collective."""
    return max_over_ranks(torch.tensor(flags, dtype=torch.uint8)).bool().tolist()


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
    own = parts.new_empty(sum(received))
    dist.all_to_all_single(own, parts, list(received), list(counts))
    return own


def broadcast_value(value: T, kind: Any) -> T:
    """Return rank 0's small `value`, of a type `kind` that `from_json` knows, on every rank."""
    if dist.get_world_size() == 1:
        return value
    message = _encoded(value)
    size = torch.tensor([message.numel()])  # sent first: receivers need a tensor of this size
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        message = torch.empty(_checked_size(0, size), dtype=torch.uint8)
    dist.broadcast(message, src=0)
    return _decoded(0, message, kind)


def gather_values(value: T, kind: Any) -> list[T]:
    """Return the small values of all ranks, in rank order, as `broadcast_value` passes them."""
    if dist.get_world_size() == 1:
        return [value]
    # Rows are of equal length: the sizes go first, then messages padded to the longest.
    message = _encoded(value)
    sizes = gather_rows(torch.tensor([message.numel()]))
    lengths = [_checked_size(rank, size) for rank, size in enumerate(sizes)]
    gathered = gather_rows(pad(message, (0, max(lengths) - message.numel())))
    return [_decoded(rank, gathered[rank][:size], kind) for rank, size in enumerate(lengths)]


def gather_present(value: T | None, kind: Any) -> list[T]:
    """Return the values of the ranks that have one, in rank order.

    In the usual case, no value on any rank, this costs one exchange of a flag.
    """
    if not any_rank(value is not None):
        return []
    return [present for present in gather_values(value, kind | None) if present is not None]


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Run the block on every rank; then raise the UserError or OSError of the first rank that has
    one, on all ranks."""
    # A rank that raised alone would leave the others waiting in their next collective.
    problem, cause = None, None
    try:
        yield
    except (UserError, OSError) as error:
        problem, cause = RankProblem.of(error), error
    for first in gather_present(problem, RankProblem):
        raise cause if cause is not None and first == problem else first.error()


def read_on_main(world: World, read: Callable[[], T], kind: Any) -> T:
    """Call `read` on rank 0; return its result, of type `kind`, or raise its error on all."""
    value: Any = None
    with raise_on_all_ranks():
        value = read() if world.is_main else None
    return broadcast_value(value, kind)


@dataclass(frozen=True)
class RankProblem:
    """A UserError, or an OSError with its number, in the form that ranks exchange."""

    kind: str
    message: str
    number: int | None = None
    path: str | None = None

    @classmethod
    def of(cls, error: UserError | OSError) -> RankProblem:
        if isinstance(error, OSError) and error.errno is not None:
            name = error.filename  # a path or a descriptor
            path = os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None
            return cls(OSError.__name__, error.strerror or "", error.errno, path)
        kinds = (base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS)
        return cls(next(kinds, UserError.__name__), str(error))

    def error(self) -> UserError | OSError:
        """Return the error as it was raised: the same class, so the same exit status."""
        if self.number is not None:
            return OSError(self.number, self.message, self.path)
        return _KINDS.get(self.kind, UserError)(self.message)


def _encoded(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(to_tree(value)).encode()), dtype=torch.uint8)


def _checked_size(rank: int, size: torch.Tensor) -> int:
    if not 0 < (num_bytes := int(size)) <= LARGEST_MESSAGE_BYTES:
        raise UserError(
            f"rank {rank} announced a message of {num_bytes:,} bytes, expected 1 to "
            f"{LARGEST_MESSAGE_BYTES:,}; {ONLY_OURS}"
        )
    return num_bytes


def _decoded(rank: int, message: torch.Tensor, kind: Any) -> Any:
    try:
        return from_json(kind, bytes(message.numpy()))
    except ValueError:
        raise UserError(f"rank {rank} sent no message of this program; {ONLY_OURS}") from None
