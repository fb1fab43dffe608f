"""Losses of tokens in blocks: those of plain operations, whose bits they keep, and gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from pretrain.model import token_losses as module
from pretrain.model.token_losses import token_losses

T, V = 21, 40


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_compute_what_plain_operations_do(monkeypatch, dtype, z_loss) -> None:
    monkeypatch.setattr(module, "BLOCK_LOGITS", 8 * V)  # three blocks, the last of five rows
    torch.manual_seed(0)
    weights, targets_T = torch.randn(T, V, dtype=dtype).mul_(5), torch.randint(V, (T,))
    leaves = [weights.clone().requires_grad_() for _ in range(2)]
    expected = module._losses(leaves[0] * 1, targets_T, z_loss)
    found = token_losses(leaves[1] * 1, targets_T, z_loss)
    plain = cross_entropy(weights.double(), targets_T, reduction="none")
    torch.testing.assert_close(found.double(), plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, expected)
    gradient_T = torch.rand_like(found)
    for losses in (expected, found):
        losses.backward(gradient_T)
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_the_logits_give_their_place_once() -> None:
    weights, targets_T = torch.randn(T, V, requires_grad=True), torch.randint(V, (T,))
    logits_TV = weights * 1
    losses = token_losses(logits_TV, targets_T, 0.0)
    losses.sum().backward(retain_graph=True)
    assert torch.equal(logits_TV, weights.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_an_unknown_target_is_an_error() -> None:
    for target in (-100, -1, V):
        with pytest.raises(RuntimeError, match="out of bounds"):
            token_losses(torch.randn(1, V), torch.tensor([target]), 0.0)
