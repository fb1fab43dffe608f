"""Whole matrices from the fragments of all ranks, and results back to the fragments.

Each matrix has one owner, so picked that all ranks have about the same work. All parts that a rank
sends to another travel together, in one all-to-all each way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pretrain.distributed.rounds import rows_of_ranks
from pretrain.distributed.world import World, exchange_parts

Span = tuple[int, int]  # the elements [start, stop) of a flattened matrix


class MatrixExchange:
    """The way of some matrices to their owners and back; making it is a collective.

    `shapes` and `costs`, by name, are equal on all ranks. `spans` are the elements that this rank
    holds; without `is_sharded` it holds all, as every other rank does.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        costs: Mapping[str, float],
        spans: Mapping[str, Span],
        is_sharded: bool,
        world: World,
    ) -> None:
        rank, num_ranks = world.rank, world.world_size
        self._shapes = dict(shapes)
        self._is_sharded = is_sharded
        owner_of = dict(
            zip(shapes, owners([costs[name] for name in shapes], num_ranks), strict=True)
        )
        self.owned = [name for name in shapes if owner_of[name] == rank]
        if is_sharded:
            of_ranks = _spans_of_all_ranks([spans.get(name, (0, 0)) for name in shapes])
            held = [dict(zip(shapes, each, strict=True)) for each in of_ranks]
        else:
            held = [{name: (0, rows * width) for name, (rows, width) in shapes.items()}] * num_ranks
        # Parts as this rank holds them, ordered by owner, and as it owns them, ordered by holder.
        self._held = [(name, held[rank][name]) for name in sorted(shapes, key=owner_of.__getitem__)]
        self._owned = [(name, of_rank[name]) for of_rank in held for name in self.owned]
        self._to_owners = [
            _size_of([held[rank][name] for name in shapes if owner_of[name] == owner])
            for owner in range(num_ranks)
        ]
        self._to_holders = [_size_of([of_rank[name] for name in self.owned]) for of_rank in held]

    def gather(self, parts: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Return the matrices that this rank owns, of the type and on the device of `like`.

        `parts` are the elements that this rank holds, flat.
        """
        if not self._is_sharded:
            return {name: parts[name].view(self._shapes[name]) for name in self.owned}
        own = [parts[name] for name, (start, stop) in self._held if stop > start]
        found = exchange_parts(torch.cat([*own, like]), self._to_owners, self._to_holders)
        wholes = {name: like.new_empty(self._shapes[name]) for name in self.owned}
        sizes = [stop - start for _, (start, stop) in self._owned]
        for (name, (start, stop)), part in zip(self._owned, found.split(sizes), strict=True):
            wholes[name].view(-1)[start:stop] = part
        return wholes

    def scatter(self, wholes: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Return the elements that this rank holds, flat. `wholes` are matrices that it owns."""
        flat = {name: whole.reshape(-1) for name, whole in wholes.items()}
        own = [flat[name][start:stop] for name, (start, stop) in self._owned]
        found = exchange_parts(torch.cat([*own, like]), self._to_holders, self._to_owners)
        sizes = [stop - start for _, (start, stop) in self._held]
        names = [name for name, _ in self._held]
        return dict(zip(names, found.split(sizes), strict=True))


def owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return the owner of each matrix: the largest first, each to the rank with the least so far.

    With equal costs these are ranks 0, 1, 2 and so on in turn.
    """
    loads = [0.0] * num_ranks
    found = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        found[index] = min(range(num_ranks), key=loads.__getitem__)
        loads[found[index]] += costs[index]
    return found


def _spans_of_all_ranks(own: Sequence[Span]) -> list[list[Span]]:
    """Return the spans that each rank passes, in rank order. A collective."""
    spans = rows_of_ranks(torch.tensor(own, dtype=torch.int64).view(-1, 2))
    return [[(start, stop) for start, stop in of_rank] for of_rank in spans.tolist()]


def _size_of(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)
