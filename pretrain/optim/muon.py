"""Muon for the layers' matrices, AdamW for everything else.

Muon (Jordan et al. 2024) makes the average of gradients orthogonal: all its singular values become
about 1, so that rare directions count as much as frequent ones.

    m = momentum m + (1 - momentum) g
    O = NewtonSchulz((1 - momentum) g + momentum m), or of m without `nesterov`
    w = w (1 - lr decay) - lr scale O

That needs whole matrices, and ZeRO shards them. The average is kept element by element where the
weights are, like Adam's moments, so it is saved and resharded as those are. In each step a matrix
travels to one rank and its O back, both in the type in which O is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data_pipeline.setting_fields import assert_never
from pretrain.config.choices import ReductionPrecision, UpdateScaling
from pretrain.config.optim import OptimConfig
from pretrain.costs.muon import NEWTON_SCHULZ_STEPS, newton_schulz_flops
from pretrain.optim.adamw import GuardedAdamW
from pretrain.optim.fragments import Fragment, FragmentIndex, create_state
from pretrain.optim.matrix_exchange import MatrixExchange
from pretrain.optim.parameter_groups import stacked_matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.: the steepest at 0 that stays near 1
SMALLEST_NORM = 1e-7
RMS_OF_ADAMW = 0.2  # of an element of AdamW's updates, as Liu et al. 2025 measured


class Muon(GuardedAdamW):
    """Muon for the groups that say `orthogonalizes`, AdamW for the others.

    `skips`, `index` and `meter` are those of GuardedAdamW. Until `index` is set, a step of Muon's
    groups only creates their state: ZeRO takes such a step while it initializes.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], optim: OptimConfig) -> None:
        super().__init__(
            groups, lr=0.0, betas=optim.betas, eps=optim.epsilon, weight_decay=0.0, fused=True
        )
        self._settings = optim.muon
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
        exchange = self._exchange_of(self.index, group, masters, fragments)
        like = torch.empty(
            0, dtype=_dtype_of(self._settings.precision), device=self.index.world.device
        )
        averages = {each.name: self._average(each).to(like) for each in fragments}
        wholes = exchange.gather(averages, like)
        for name in exchange.owned:
            stacked = wholes[name].chunk(stacked_matrices(name))
            wholes[name] = torch.cat([orthogonalized(matrix) for matrix in stacked])
        self._apply(group, fragments, exchange.scatter(wholes, like))

    def _average(self, fragment: Fragment) -> Tensor:
        """Update the average of gradients; returns what is to be made orthogonal."""
        gradient, average = fragment.gradient(), fragment.values["momentum"]
        average.lerp_(gradient, 1.0 - self._settings.momentum)
        if not self._settings.nesterov:
            return average
        return gradient.lerp(average, self._settings.momentum)

    def _apply(
        self, group: dict[str, Any], fragments: Sequence[Fragment], orthogonal: Mapping[str, Tensor]
    ) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        measured = self.meter is not None and self.meter.is_on
        updates: list[Tensor] = []
        for each in fragments:
            rows, width = group["shapes"][each.name]
            scale = update_scale(self._settings.scaling, rows // stacked_matrices(each.name), width)
            weight, update = each.values["weight"], orthogonal[each.name].to(each.master.device)
            if measured:
                updates.append(update.float() * scale + decay * weight)
            weight.mul_(1.0 - rate * decay)
            weight.add_(update, alpha=-(rate * scale))
        if self.meter is not None and measured:
            self.meter.add(fragments, updates, rate)

    def _exchange_of(
        self,
        index: FragmentIndex,
        group: dict[str, Any],
        masters: Sequence[Tensor],
        fragments: Sequence[Fragment],
    ) -> MatrixExchange:
        """Return the exchange of the matrices in `masters`: under ZeRO-3 a part of the group."""
        names = index.names_in(masters)
        if names not in self._exchanges:
            shapes = {name: group["shapes"][name] for name in names}
            costs = {name: _cost(name, *shape) for name, shape in shapes.items()}
            spans = {
                each.name: (each.start, each.start + each.values["weight"].numel())
                for each in fragments
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
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def update_scale(scaling: UpdateScaling, rows: int, width: int) -> float:
    """Return the factor of an orthogonal update of a matrix."""
    match scaling:
        case "match_rms_adamw":  # Liu et al. 2025, section 2.2
            return RMS_OF_ADAMW * math.sqrt(max(rows, width))
        case "original":
            return math.sqrt(max(1.0, rows / width))
        case _:
            assert_never(scaling)


def _dtype_of(precision: ReductionPrecision) -> torch.dtype:
    match precision:
        case "fp32":
            return torch.float32
        case "bf16":
            return torch.bfloat16
        case _:
            assert_never(precision)


def _cost(name: str, rows: int, width: int) -> float:
    stacked = stacked_matrices(name)
    return stacked * newton_schulz_flops(rows // stacked, width)
