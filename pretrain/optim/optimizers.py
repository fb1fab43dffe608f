"""The configured optimizer, gradient clipping, and when a step must be skipped."""

import math

import torch
from torch import Tensor, nn

from foundation.settings import assert_never
from pretrain.config.model import Precision
from pretrain.config.run import OptimConfig
from pretrain.model.adopted import LanguageModel
from pretrain.optim.adamw import GuardedAdamW
from pretrain.optim.lamb import Lamb
from pretrain.optim.muon import Muon
from pretrain.optim.parameter_groups import parameter_groups


def build_optimizer(
    module: LanguageModel, optim: OptimConfig, precision: Precision = "fp32"
) -> GuardedAdamW | Lamb | Muon:
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
            # fp16 would overflow where Newton and Schulz's iteration squares.
            dtype = torch.float32 if precision == "fp32" else torch.bfloat16
            return Muon(groups, optim, dtype)
        case _:
            assert_never(optim.name)


def clip_gradients(module: nn.Module, optim: OptimConfig) -> Tensor:
    """Clip gradients to a global norm of `clip_norm` (0: no limit); returns the norm before."""
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    limit = optim.clip_norm or float("inf")
    return nn.utils.clip_grad_norm_(parameters, limit, foreach=True)


def must_skip(grad_norm: float, skip_grad_norm: float) -> bool:
    """Return whether this global norm is non-finite or above `skip_grad_norm` (0: no limit)."""
    return not math.isfinite(grad_norm) or 0.0 < skip_grad_norm < grad_norm
