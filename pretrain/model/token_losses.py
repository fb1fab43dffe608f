"""The loss of each token: a softmax over logits in blocks of rows that stay in a CPU's cache.

The backward pass writes the gradient of the logits in their place, so that one copy of them exists,
in their own type. Plain operations would keep three in float32, and five with z-loss. Compiled for
a GPU, plain operations become two loops.

T tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, log_softmax

from pretrain.config.engine import BLOCK_LOGITS, BLOCK_LOGITS_OF_GPU
from pretrain.model.compiled import compiled_if

_NO_TARGET = -(2**63)  # no target has this `ignore_index`; torch's, -100, could hide a wrong one


def token_losses(
    logits_TV: Tensor, targets_T: Tensor, z_loss: float, compiles: bool = False
) -> Tensor:
    """Return the NLL [T] in float32 or wider. The backward pass overwrites the logits.

    z-loss (Chowdhery et al. 2022) acts in the gradient only: it draws the logarithm of the
    softmax's normalizer, log(sum(exp(logits))), towards zero.
    """
    if compiles and logits_TV.is_cuda:
        return compiled_if(compiles, _losses)(logits_TV, targets_T, z_loss)
    return _TokenLosses.apply(logits_TV, targets_T, z_loss)


def at_least_float32(logits: Tensor) -> Tensor:
    """Return the logits in the precision of the loss: float32, or float64 if they have it."""
    return logits if logits.dtype == torch.float64 else logits.float()


def with_gradient_of(loss: Tensor, other: Tensor) -> Tensor:
    """Return `loss` with the gradient of `loss + other`: losses stay comparable to the last bit."""
    return loss + (other - other.detach())


def _losses(logits_TV: Tensor, targets_T: Tensor, z_loss: float) -> Tensor:
    logits_TV = at_least_float32(logits_TV)
    nll_T = cross_entropy(logits_TV, targets_T, ignore_index=_NO_TARGET, reduction="none")
    if not z_loss:
        return nll_T
    return with_gradient_of(nll_T, z_loss * logits_TV.logsumexp(1).square())


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, z_loss: float) -> Tensor:
        rows = _block_rows(logits_TV)
        losses, normalizers = [], []
        for logits, targets in zip(logits_TV.split(rows), targets_T.split(rows), strict=True):
            precise = at_least_float32(logits)
            logs = log_softmax(precise, dim=1)
            losses.append(-logs.gather(1, targets[:, None])[:, 0])
            normalizers.append(precise[:, 0] - logs[:, 0])
        ctx.z_loss = z_loss
        ctx.save_for_backward(logits_TV, targets_T, torch.cat(normalizers))
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        [gradient_T] = gradients
        logits_TV, targets_T, normalizer_T = ctx.saved_tensors
        rows = _block_rows(logits_TV)
        of_softmax_T = gradient_T * (1.0 + 2.0 * ctx.z_loss * normalizer_T)
        parts = (logits_TV, targets_T, of_softmax_T, gradient_T)
        for logits, targets, of_softmax, gradient in zip(
            *(part.split(rows) for part in parts), strict=True
        ):
            weights = torch.softmax(at_least_float32(logits), dim=1)
            weights.mul_(of_softmax[:, None])
            weights.scatter_add_(1, targets[:, None], -gradient[:, None])
            logits.copy_(weights)
        return logits_TV, None, None


def _block_rows(logits_TV: Tensor) -> int:
    size = BLOCK_LOGITS if logits_TV.is_cpu else BLOCK_LOGITS_OF_GPU
    return max(8, size // logits_TV.shape[1])
