"""What replaces definitions of the same names in an export: functions without GPU kernels."""

import torch

from pretrain.config.model import AttentionKernel, ModelConfig
from pretrain.mixers.deltanet.delta_rule import DeltaRulePath, delta_rule


def delta_rule_for(
    kernel: AttentionKernel, model: ModelConfig, kind: str, device: torch.device, dtype: torch.dtype
) -> DeltaRulePath:
    """Return the function that computes states."""
    return delta_rule
