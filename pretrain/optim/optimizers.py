"""AdamW and LAMB over fragments of parameters.

Both optimizers get tensors from ZeRO that are flat slices of many parameters. A `FragmentIndex`,
set after construction, tells them which parameter is where.
"""

# torch exports its _foreach functions without listing them.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data_pipeline.setting_fields import assert_never
from pretrain.config.optim import OptimConfig
from pretrain.distributed.world import sum_over_ranks
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.fragments import Fragment, FragmentIndex, create_state
from pretrain.optim.layer_norms import LayerMeter, layer_of
from pretrain.optim.parameter_groups import parameter_groups


def build_optimizer(module: TransformerXL, optim: OptimConfig) -> GuardedAdamW | Lamb:
    """Return the configured optimizer; the engine sets its learning rate before every step."""
    groups = parameter_groups(module, optim)
    match optim.name:
        case "adamw":
            return GuardedAdamW(
                groups, lr=0.0, betas=optim.betas, eps=optim.epsilon, weight_decay=0.0, fused=True
            )
        case "lamb":
            return Lamb(groups, optim.betas, optim.epsilon)
        case _:
            assert_never(optim.name)


def must_skip(grad_norm: Tensor | float, skip_grad_norm: float) -> bool:
    """Whether this global norm is non-finite, or above the limit `skip_grad_norm` (0: none)."""
    norm = float(grad_norm)
    return not math.isfinite(norm) or 0.0 < skip_grad_norm < norm


def adam_updates(
    fragments: Sequence[Fragment], group: Mapping[str, Any], num_updates: Tensor
) -> list[Tensor]:
    """Return Adam's update (Kingma and Ba 2015) of each fragment, without the learning rate.

        m / (sqrt(v) + epsilon), m and v corrected for bias after `num_updates`

    `num_updates` may be on the accelerator; nothing here waits for it.
    """
    if not fragments:
        return []
    # 1 - 0.999 has half its digits left in float32, so the difference is taken in float64.
    corrections = [(1.0 - torch.pow(beta, num_updates.double())).float() for beta in group["betas"]]
    updates = list(torch._foreach_sqrt([fragment.values["exp_avg_sq"] for fragment in fragments]))
    torch._foreach_div_(updates, corrections[1].sqrt())
    torch._foreach_add_(updates, group["eps"])
    torch._foreach_reciprocal_(updates)
    torch._foreach_mul_(updates, [fragment.values["exp_avg"] for fragment in fragments])
    torch._foreach_div_(updates, corrections[0])
    return updates


class GuardedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019) that changes nothing, nor counts a step, while `skips()`.

    The check is inside the optimizer because ZeRO computes the gradients' norm in the middle of its
    own step, right before it calls this one. Once `index` and `meter` are set, updates are passed
    to the meter while it is on.
    """

    skips: Callable[[], bool] = staticmethod(lambda: False)
    index: FragmentIndex | None = None
    meter: LayerMeter | None = None

    def step(self, closure: Any = None) -> Any:
        if self.skips():
            return
        super().step(closure)
        if self.index is not None and self.meter is not None and self.meter.is_on:
            for group in self.param_groups:
                self._measure(group, self.index, self.meter)

    @torch.no_grad()
    def _measure(self, group: dict[str, Any], index: FragmentIndex, meter: LayerMeter) -> None:
        """Pass the update that was just applied to the meter, layer by layer to need little memory.

        The fused kernel does not return it and the old weights w are gone, but it follows from the
        moments and the new weights w'. With w' = w (1 - lr decay) - lr a, where a = `adam_updates`:

            w' - w = -lr (a + decay w') / (1 - lr decay)
        """
        rate, decay = group["lr"], group["weight_decay"]
        fragments = index.fragments_in(group["params"])
        for _, in_layer in itertools.groupby(
            fragments, key=lambda fragment: layer_of(fragment.name)
        ):
            parts = list(in_layer)
            updates = adam_updates(parts, group, self.state[parts[0].master]["step"])
            torch._foreach_add_(updates, [part.values["weight"] for part in parts], alpha=decay)
            meter.add(parts, updates, rate / (1.0 - rate * decay))


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, "Large batch optimization for deep learning", algorithm 2).

        r = m / (sqrt(v) + epsilon), m and v corrected for bias
        u = r + decay * w
        w -= lr * |w| / |u| * u

    |w| and |u| are norms of whole parameters: where elements are sharded across ranks, the ranks
    add up squares, in one small all-reduce per group. |w| is used as it is (phi(z) = z), and the
    ratio is 1 where either norm is 0. Parameters that do not decay (norms, biases) get plain Adam,
    ratio 1, as in the authors' BERT; which these are does not depend on the size of the decay.

    The engine clips gradients by their global norm before the step, so the moments see clipped
    gradients. `skips`, `index` and `meter` are those of GuardedAdamW. Until `index` is set, a step
    only creates the moments: ZeRO takes such a step while it initializes.
    """

    skips: Callable[[], bool] = staticmethod(lambda: False)
    index: FragmentIndex | None = None
    meter: LayerMeter | None = None

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
