"""What stands in an export for definitions of the same names: no kernels for GPUs."""

import torch

from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.mixers.deltanet.delta_rule import DeltaRulePath, delta_rule


def delta_rule_for(
    kernel: AttentionKernel, model: ModelConfig, kind: str, device: torch.device, dtype: torch.dtype
) -> DeltaRulePath:
    """Return how the states are computed."""
    return delta_rule
