"""Which parameters decay, and the optimizers over them."""

# torch exports its _foreach functions without listing them.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config.run import OptimConfig
from pretrain.optim.adam_direction import adam_updates
from pretrain.optim.fragments import FragmentIndex
from pretrain.optim.lamb import Lamb
from pretrain.optim.layer_norms import LayerMeter, layer_of


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Matrices decay; vectors, and whatever has `bias` or `norm` in its name (u, v and T5's table too), do not."""
    decayed, kept = [], []
    for name, parameter in module.named_parameters():
        whole_shape = getattr(
            parameter, "ds_shape", parameter.shape
        )  # ZeRO-3 leaves a vector in the parameter's place
        (decayed if decays(name, len(whole_shape)) else kept).append(parameter)
    groups = [
        {"params": decayed, "decays": True, "weight_decay": optim.weight_decay},
        {"params": kept, "decays": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def decays(name: str, num_axes: int) -> bool:
    """Whether weight decay acts on the parameter of this name."""
    return num_axes >= 2 and "bias" not in name and "norm" not in name


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that leaves weights, moments and its count of steps as they are while `refuses()` is true.

    What spreads an optimizer over ranks knows the gradients' norm only in the middle of its own step. Once `placement`
    and `meter` are set, each update is passed to the meter if it asks.
    """

    refuses: Callable[[], bool] = staticmethod(lambda: False)
    placement: FragmentIndex | None = None
    meter: LayerMeter | None = None

    def step(self, closure: Any = None) -> Any:
        if self.refuses():
            return
        super().step(closure)
        if self.placement is not None and self.meter is not None and self.meter.is_on:
            for group in self.param_groups:
                self._measure(group, self.placement, self.meter)

    @torch.no_grad()
    def _measure(self, group: dict[str, Any], placement: FragmentIndex, meter: LayerMeter) -> None:
        """Tell the meter what was just applied, from the moments, a layer at a time to need little memory.

        w = w' * (1 - lr * decay) - lr * direction, so the update w - w' = -lr * (direction + decay * w) / (1 - lr *
        decay): the weights before it are not needed.
        """
        rate, decay = group["lr"], group["weight_decay"]
        fragments = placement.fragments_in(group["params"])
        for _, in_layer in itertools.groupby(
            fragments, key=lambda fragment: layer_of(fragment.name)
        ):
            parts = list(in_layer)
            updates = adam_updates(parts, group, self.state[parts[0].master]["step"])
            torch._foreach_add_(updates, [part.values["weight"] for part in parts], alpha=decay)
            meter.add(parts, updates, rate / (1.0 - rate * decay))


def is_harmful(grad_norm: Tensor | float, skip_grad_norm: float) -> bool:
    """Whether gradients of this global norm must not be applied: no number, or above `skip_grad_norm` (0: no limit)."""
    norm = float(grad_norm)
    return not math.isfinite(norm) or 0.0 < skip_grad_norm < norm


def build_optimizer(module: nn.Module, optim: OptimConfig) -> GuardedAdamW | Lamb:
    """AdamW in its fused form (Loshchilov and Hutter 2019) or LAMB; the learning rate is set anew before every step."""
    groups = parameter_groups(module, optim)
    if optim.name == "lamb":
        return Lamb(groups, optim.betas, optim.epsilon)
    return GuardedAdamW(
        groups, lr=0.0, betas=optim.betas, eps=optim.epsilon, weight_decay=0.0, fused=True
    )
