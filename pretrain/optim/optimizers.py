"""The configured optimizer, and when it must skip a step.

All optimizers get tensors from ZeRO that are flat slices of many parameters. A `FragmentIndex`,
set after construction, tells them which parameter is where.
"""

from __future__ import annotations

import math

from data_pipeline.setting_fields import assert_never
from pretrain.config.optim import OptimConfig
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.adamw import GuardedAdamW
from pretrain.optim.lamb import Lamb
from pretrain.optim.muon import Muon
from pretrain.optim.parameter_groups import parameter_groups


def build_optimizer(module: TransformerXL, optim: OptimConfig) -> GuardedAdamW | Lamb | Muon:
    """Return the configured optimizer; the engine sets its learning rate before every step."""
    groups = parameter_groups(module, optim)
    match optim.name:
        case "adamw":
            return GuardedAdamW(
                groups, lr=0.0, betas=optim.betas, eps=optim.epsilon, weight_decay=0.0, fused=True
            )
        case "lamb":
            return Lamb(groups, optim.betas, optim.epsilon)
        case "muon":
            return Muon(groups, optim)
        case _:
            assert_never(optim.name)


def must_skip(grad_norm: float, skip_grad_norm: float) -> bool:
    """Whether this global norm is non-finite, or above the limit `skip_grad_norm` (0: none)."""
    return not math.isfinite(grad_norm) or 0.0 < skip_grad_norm < grad_norm
