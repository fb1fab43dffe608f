"""Which parameters decay, and the optimizer over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config import OptimConfig


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Matrices decay; vectors, and whatever has `bias` or `norm` in its name (u, v and T5's table too), do not."""
    decayed, kept = [], []
    for name, parameter in module.named_parameters():
        (decayed if decays(name, parameter.ndim) else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def decays(name: str, num_axes: int) -> bool:
    """Whether weight decay acts on the parameter of this name."""
    return num_axes >= 2 and "bias" not in name and "norm" not in name


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that leaves weights, moments and its count of steps as they are while `refuses()` is true.

    What spreads an optimizer over ranks knows the gradients' norm only in the middle of its own step.
    """

    refuses: Callable[[], bool] = staticmethod(lambda: False)

    def step(self, closure: Any = None) -> Any:
        return None if self.refuses() else super().step(closure)


def is_harmful(grad_norm: Tensor | float, skip_norm: float) -> bool:
    """Whether gradients of this global norm must not be applied: no number, or above `skip_norm` (0: no limit)."""
    norm = float(grad_norm)
    return not math.isfinite(norm) or 0.0 < skip_norm < norm


def build_adamw(module: nn.Module, optim: OptimConfig) -> GuardedAdamW:
    """AdamW in its fused form (Loshchilov and Hutter 2019); the learning rate is set anew before every step."""
    return GuardedAdamW(
        parameter_groups(module, optim),
        lr=0.0,
        betas=optim.betas,
        eps=optim.epsilon,
        weight_decay=0.0,
        fused=True,
    )
