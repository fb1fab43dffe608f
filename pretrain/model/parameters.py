"""How parameters come into being: drawn where they are declared, so that they are final when a module's init returns.

(DeepSpeed may partition a module's parameters the moment its init returns; what is initialised later is lost.)
"""

from __future__ import annotations

import torch
from torch import nn

NORM_EPSILON = 1e-5


def normal(*shape: int, std: float, mean: float = 0.0) -> nn.Parameter:
    """A parameter drawn from a normal distribution with torch's default generator."""
    return nn.Parameter(torch.empty(shape).normal_(mean, std))


def zeros(*shape: int) -> nn.Parameter:
    """A parameter of zeros."""
    return nn.Parameter(torch.zeros(shape))


class LayerNorm(nn.Module):
    """Layer normalisation; the gain starts at normal(1, std) as published."""

    def __init__(self, width: int, std: float) -> None:
        super().__init__()
        self.gain = normal(width, mean=1.0, std=std)
        self.bias = zeros(width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(values, self.gain.shape, self.gain, self.bias, NORM_EPSILON)
