"""The ranks of a group that share lanes (`engine.sequence_ranks`), and what they exchange.

Place p of s holds the tokens t of every segment with t mod s = p, and the rows of memory of such
tokens. Segments and memories divide by s, so a row that passes from the segment to the memory stays
where it is. Only attention mixes tokens: before it, the places exchange their tokens' queries, keys
and values for some heads of all tokens, after it back (Jacobs et al. 2023, DeepSpeed Ulysses,
arXiv 2309.14509).

Letters of shapes as in `pretrain.model`; X are rows of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class SequenceShare:
    """This rank's place among the ranks that share its lanes."""

    place: int
    places: int
    group: dist.ProcessGroup

    def own_rows(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return a view of this place's rows: every s-th."""
        return whole.unflatten(dim, (-1, self.places)).select(dim + 1, self.place)

    def own_heads(self, whole: Tensor, dim: int) -> Tensor:
        """Return a view of what belongs to this place's heads, which follow each other."""
        size = whole.shape[dim] // self.places
        return whole.narrow(dim, self.place * size, size)

    def to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return all rows [B, X, ..., n, H] of this place's heads, in the order of their tokens.

        Each part has this place's rows of all heads, [B, X / s, ..., s n, H].
        """
        sent = [self._by_place(part, part.dim() - 2) for part in parts]
        return [each.movedim(0, 2).flatten(1, 2) for each in self._exchanged(sent)]

    def to_rows(self, attended_BLNH: Tensor) -> Tensor:
        """Return this place's rows of all heads [B, L / s, s n, H], from all rows of its heads."""
        sent = attended_BLNH.unflatten(1, (-1, self.places)).movedim(2, 0)
        (found,) = self._exchanged([sent])
        return found.movedim(0, 2).flatten(2, 3)

    def whole_rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Return all rows of some lanes [B', X, ...]; place i gets the next `counts[i]` lanes.

        `own` has this place's rows of all lanes, [B, X / s, ...].
        """
        mine = counts[self.place]
        found = own.new_empty(self.places * mine, *own.shape[1:])
        sizes = [mine] * self.places
        dist.all_to_all_single(found, own.contiguous(), sizes, list(counts), group=self.group)
        return found.unflatten(0, (self.places, mine)).movedim(0, 2).flatten(1, 2)

    def _by_place(self, part: Tensor, dim: int) -> Tensor:
        return part.unflatten(dim, (self.places, -1)).movedim(dim, 0)

    def _exchanged(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send part[i] to place i; returns what all sent here, by place. One collective."""
        sent = [part.flatten(1) for part in parts]
        joined = sent[0].contiguous() if len(sent) == 1 else torch.cat(sent, dim=1)
        found = _Exchange.apply(joined, self.group)
        assert isinstance(found, Tensor)
        sizes = [each.shape[1] for each in sent]
        split = found.split(sizes, dim=1)
        return [each.view(part.shape) for each, part in zip(split, parts, strict=True)]


class _Exchange(torch.autograd.Function):
    """Row i goes to place i. The gradient takes the same way back, which is the same exchange."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return _exchange(sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _exchange(gradient.contiguous(), ctx.group), None


def _exchange(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


def sequence_share(rank: int, places: int) -> SequenceShare | None:
    """Return this rank's place among `places` consecutive ranks; None if it has its lanes alone.

    A collective of all ranks.
    """
    if places == 1:
        return None
    first = rank - rank % places
    # Every rank makes its own group only. Made one after another, each by all ranks, thousands of
    # groups would be as many splits of the communicator of all GPUs.
    group = dist.new_group(range(first, first + places), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return SequenceShare(rank % places, places, group)
