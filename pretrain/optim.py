"""Which parameters decay, and the optimizer over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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


def build_adamw(module: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW in its fused form (Loshchilov and Hutter 2019); the learning rate is set anew before every step."""
    return torch.optim.AdamW(
        parameter_groups(module, optim),
        lr=0.0,
        betas=optim.betas,
        eps=optim.epsilon,
        weight_decay=0.0,
        fused=True,
    )
