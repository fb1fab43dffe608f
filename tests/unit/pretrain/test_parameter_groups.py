"""Every parameter of every variant has one role, from which the optimizer's groups follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pretrain.config.optim import OptimConfig
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.optimizers import build_optimizer
from pretrain.optim.parameter_groups import decays, role_of, set_learning_rate
from tests.helpers.choices import MODEL_CHOICES
from tests.helpers.models import TINY, VARIANTS, tiny_model


def built_variants() -> Iterator[TransformerXL]:
    """The tests' variants, and every name of every choice, with and without compressed rows."""
    for options in VARIANTS.values():
        yield TransformerXL(replace(TINY, **options))
    for name, value in MODEL_CHOICES:
        yield TransformerXL(replace(TINY, compressed_length=2, **{name: value}))


def test_every_parameter_of_every_variant_has_one_role() -> None:
    for module in built_variants():
        for name, parameter in module.named_parameters():
            role = role_of(name)
            # Under ZeRO-3 a parameter has no shape, so the name alone must tell.
            is_pair = name.endswith(("content_bias", "position_bias", "bucket_bias"))
            assert (parameter.dim() == 2) == (decays(role) or is_pair), (name, role)


@pytest.mark.parametrize("name", ["layers.0.attention.sink", "head.bins.0.gate", "bias"])
def test_a_parameter_without_a_role_is_an_error(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        role_of(name)


def test_a_bin_that_no_token_is_in_takes_adams_step_for_a_gradient_of_zero() -> None:
    model = tiny_model(cutoffs=(9, 20), tie_embeddings=False)
    optim = OptimConfig(learning_rate=0.01, weight_decay=0.1)
    optimizer = build_optimizer(model, optim)
    set_learning_rate(optimizer.param_groups, optim.learning_rate)
    unused, gradients, before = model.head.bins[2].weight, [], []
    for first, last in ((20, 37), (0, 9)):
        tokens_BL = torch.arange(first, last)[None]
        model(tokens_BL, tokens_BL)[0].mean().backward()
        gradients.append(unused.grad)
        before.append(unused.detach().clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert gradients[0].abs().max() > 0
    assert torch.equal(gradients[1], torch.zeros_like(unused))
    first_moment = 0.9 * 0.1 * gradients[0] / (1 - 0.9**2)
    second_moment = 0.999 * 0.001 * gradients[0].square() / (1 - 0.999**2)
    update = first_moment / (second_moment.sqrt() + optim.epsilon) + 0.1 * before[1]
    torch.testing.assert_close(unused.detach(), before[1] - 0.01 * update, rtol=1e-9, atol=1e-12)
