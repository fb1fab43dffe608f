"""LAMB, an optimizer for very large batches."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.distributed.collectives import sum_over_ranks
from pretrain.optim.adamw import FragmentOptimizer, adam_updates
from pretrain.optim.parameter_groups import FragmentIndex, create_state

# pyright: reportPrivateImportUsage=false


class Lamb(FragmentOptimizer, torch.optim.Optimizer):
    """LAMB (You et al. 2020, "Large batch optimization for deep learning", algorithm 2).

        r = m / (sqrt(v) + epsilon), m and v corrected for bias
        u = r + decay * w
        w -= lr * |w| / |u| * u

    |w| and |u| are norms of whole parameters: where elements are sharded across ranks, the ranks
    add up squares, in one small all-reduce per group. |w| is used as it is (phi(z) = z), and the
    ratio is 1 where either norm is 0. Parameters that do not decay (norms, biases) get plain Adam,
    ratio 1, as in the authors' BERT; which these are does not depend on the size of the decay.

    The engine clips gradients by their global norm before the step, so the moments see clipped
    gradients. Until `index` is set, a step only creates the moments: ZeRO takes such a step while
    it initializes.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.skips():
            return
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.grad is not None]
            if masters:
                self._update_moments(group, masters)
                self._update_weights(group, masters)

    def _update_moments(self, group: dict[str, Any], masters: Sequence[Tensor]) -> None:
        for master in masters:
            create_state(self.state[master], master)
            self.state[master]["step"] += 1
        exp_avgs, exp_avg_sqs = (
            [self.state[master][key] for master in masters] for key in ("exp_avg", "exp_avg_sq")
        )
        gradients = [master.grad for master in masters if master.grad is not None]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(exp_avgs, gradients, 1.0 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1.0 - beta2)

    def _update_weights(self, group: dict[str, Any], masters: Sequence[Tensor]) -> None:
        if self.index is None:
            return
        fragments = self.index.fragments_in(masters)
        weights = [fragment.values["weight"] for fragment in fragments]
        updates = adam_updates(fragments, group, self.state[masters[0]]["step"])
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["decays"]:
            self._scale_by_trust_ratio(self.index, masters, weights, updates)
        if fragments:
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
        if self.meter is not None and self.meter.is_on:
            self.meter.add(fragments, updates, group["lr"])

    def _scale_by_trust_ratio(
        self,
        index: FragmentIndex,
        masters: Sequence[Tensor],
        weights: list[Tensor],
        updates: list[Tensor],
    ) -> None:
        """Multiply each update by |w| / |u| of its whole parameter.

        P = all parameters, F = this rank's fragments.
        A collective: a rank whose slice is padding only has no fragments, and still takes part.
        """
        squares_2P = torch.zeros(
            2, index.num_parameters, dtype=torch.float64, device=masters[0].device
        )
        parameter_F = index.parameter_indices(masters)
        if weights:
            norms_2F = torch.stack(
                [torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates)]
            )
            squares_2P[:, parameter_F] = norms_2F.double().square()
        if index.is_sharded:
            squares_2P = sum_over_ranks(squares_2P)
        weight_F, update_F = squares_2P[:, parameter_F].sqrt()
        ratio_F = torch.where((weight_F > 0) & (update_F > 0), weight_F / update_F, 1.0).float()
        for update, ratio in zip(updates, ratio_F.unbind(), strict=True):
            update.mul_(ratio)
