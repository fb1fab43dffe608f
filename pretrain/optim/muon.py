"""Muon (Jordan et al. 2024), which makes the average of gradients orthogonal.

All its singular values become about 1, so that rare directions count as much as frequent ones.

    m = momentum m + (1 - momentum) g
    O = NewtonSchulz((1 - momentum) g + momentum m)
    w = w (1 - lr decay) - lr scale O

O needs whole matrices, and ZeRO shards them. The average m is kept element by element where the
weights are, so checkpoints save and reshard it like Adam's moments. In each step one rank, the
matrix's owner, receives all parts of a matrix and sends back the parts of O, in the type that O is
computed in. All parts that a rank sends to another travel together, in one all-to-all each way.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.config.run import OptimConfig
from pretrain.costs.flops import NEWTON_SCHULZ_STEPS, newton_schulz_flops
from pretrain.distributed.collectives import exchange_parts
from pretrain.distributed.messages import gather_rows
from pretrain.distributed.world import World
from pretrain.optim.adamw import GuardedAdamW
from pretrain.optim.parameter_groups import Fragment, FragmentIndex, create_state

Span = tuple[int, int]  # the elements [start, stop) of a flattened matrix
# Of the polynomial of Jordan et al.: the steepest at 0 whose iterated values stay near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7  # of a matrix, against a division by 0
MOMENTUM = 0.95  # decay of the average of gradients
RMS_OF_ADAMW = 0.2  # of an element of AdamW's updates, as Liu et al. 2025 measured


class MatrixExchange:
    """The exchange of matrices between holders and owners; the constructor is a collective.

    `shapes` and `costs`, by name, are equal on all ranks. `spans` are the elements that this rank
    holds. Without `is_sharded` every rank holds all elements.
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
            own = torch.tensor([spans.get(name, (0, 0)) for name in shapes], dtype=torch.int64)
            of_ranks = gather_rows(own.view(-1, 2)).tolist()
            held = [
                {name: (start, stop) for name, (start, stop) in zip(shapes, of_rank, strict=True)}
                for of_rank in of_ranks
            ]
        else:
            held = [{name: (0, rows * width) for name, (rows, width) in shapes.items()}] * num_ranks
        # The parts that this rank holds, ordered by owner, and the ones it owns, by holder.
        self._held = [(name, held[rank][name]) for name in sorted(shapes, key=owner_of.__getitem__)]
        self._owned = [(name, of_rank[name]) for of_rank in held for name in self.owned]
        self._to_owners = [
            _total_size([held[rank][name] for name in shapes if owner_of[name] == owner])
            for owner in range(num_ranks)
        ]
        self._to_holders = [_total_size([of_rank[name] for name in self.owned]) for of_rank in held]

    def gather(self, parts: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Return the matrices that this rank owns, of the type and on the device of `like`.

        `parts` are the elements that this rank holds, flat.
        """
        if not self._is_sharded:
            return {name: parts[name].view(self._shapes[name]) for name in self.owned}
        own = [parts[name] for name, (start, stop) in self._held if stop > start]
        received = exchange_parts(torch.cat([*own, like]), self._to_owners, self._to_holders)
        wholes = {name: like.new_empty(self._shapes[name]) for name in self.owned}
        sizes = [stop - start for _, (start, stop) in self._owned]
        for (name, (start, stop)), part in zip(self._owned, received.split(sizes), strict=True):
            wholes[name].view(-1)[start:stop] = part
        return wholes

    def scatter(self, wholes: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Return the elements that this rank holds, flat. `wholes` are matrices that it owns."""
        flat = {name: whole.reshape(-1) for name, whole in wholes.items()}
        own = [flat[name][start:stop] for name, (start, stop) in self._owned]
        received = exchange_parts(torch.cat([*own, like]), self._to_holders, self._to_owners)
        sizes = [stop - start for _, (start, stop) in self._held]
        names = [name for name, _ in self._held]
        return dict(zip(names, received.split(sizes), strict=True))


def owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return each matrix's owner: costliest first, each goes to the rank with the least so far."""
    loads = [0.0] * num_ranks
    chosen = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        chosen[index] = min(range(num_ranks), key=loads.__getitem__)
        loads[chosen[index]] += costs[index]
    return chosen


def _total_size(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


class Muon(GuardedAdamW):
    """Muon for the groups that say `orthogonalizes`, AdamW for the others.

    Until `index` is set, a step of Muon's groups only creates their state: ZeRO takes such a step
    while it initializes.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], optim: OptimConfig, dtype: torch.dtype
    ) -> None:
        super().__init__(
            groups, lr=0.0, betas=optim.betas, eps=optim.epsilon, weight_decay=0.0, fused=True
        )
        self._dtype = dtype  # of matrices while they are made orthogonal
        self._exchanges: dict[tuple[str, ...], MatrixExchange] = {}

    def _update(self) -> None:
        groups = self.param_groups
        for group in groups:
            if group["orthogonalizes"]:
                self._update_group(group)
        # AdamW updates every group that it sees.
        self.param_groups = [group for group in groups if not group["orthogonalizes"]]
        try:
            super()._update()
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _update_group(self, group: dict[str, Any]) -> None:
        masters = [master for master in group["params"] if master.grad is not None]
        for master in masters:
            create_state(self.state[master], master, group["state"])
            self.state[master]["step"] += 1
        if self.index is None or not masters:
            return
        fragments = self.index.fragments_in(masters)
        exchange = self._matrix_exchange(self.index, group, masters, fragments)
        like = torch.empty(0, dtype=self._dtype, device=self.index.world.device)
        averages = {fragment.name: self._average(fragment).to(like) for fragment in fragments}
        wholes = exchange.gather(averages, like)
        for name in exchange.owned:
            stacked = wholes[name].chunk(group["stacked"][name])
            wholes[name] = torch.cat([orthogonalized(matrix) for matrix in stacked])
        self._apply(group, fragments, exchange.scatter(wholes, like))

    def _average(self, fragment: Fragment) -> Tensor:
        """Update the average of gradients; return the elements to make orthogonal."""
        gradient, average = fragment.gradient(), fragment.values["momentum"]
        average.lerp_(gradient, 1.0 - MOMENTUM)
        return gradient.lerp(average, MOMENTUM)

    def _apply(
        self, group: dict[str, Any], fragments: Sequence[Fragment], orthogonal: Mapping[str, Tensor]
    ) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        measured = self.meter is not None and self.meter.is_on
        updates: list[Tensor] = []
        for fragment in fragments:
            rows, width = group["shapes"][fragment.name]
            scale = update_scale(rows // group["stacked"][fragment.name], width)
            weight = fragment.values["weight"]
            update = orthogonal[fragment.name].to(weight.device)
            if measured:
                updates.append(update.float() * scale + decay * weight)
            weight.mul_(1.0 - rate * decay)
            weight.add_(update, alpha=-(rate * scale))
        if self.meter is not None and measured:
            self.meter.add(fragments, updates, rate)

    def _matrix_exchange(
        self,
        index: FragmentIndex,
        group: dict[str, Any],
        masters: Sequence[Tensor],
        fragments: Sequence[Fragment],
    ) -> MatrixExchange:
        """Return the exchange for the matrices in `masters`, under ZeRO-3 a part of the group's."""
        names = index.names_in(masters)
        if names not in self._exchanges:
            shapes = {name: group["shapes"][name] for name in names}
            costs = {name: _cost(group["stacked"][name], *shape) for name, shape in shapes.items()}
            spans = {
                fragment.name: (fragment.start, fragment.start + fragment.values["weight"].numel())
                for fragment in fragments
            }
            self._exchanges[names] = MatrixExchange(
                shapes, costs, spans, index.is_sharded, index.world
            )
        return self._exchanges[names]


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U V^T of the matrix U S V^T, with singular values of about 0.7 to 1.2 instead of 1.

    Each step of Newton and Schulz's iteration applies an odd polynomial to all singular values.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


def update_scale(rows: int, width: int) -> float:
    """Return the factor of an orthogonal update of a matrix (Liu et al. 2025, section 2.2)."""
    return RMS_OF_ADAMW * math.sqrt(max(rows, width))


def _cost(stacked: int, rows: int, width: int) -> float:
    return stacked * newton_schulz_flops(rows // stacked, width)
