"""Every parameter of every variant has one role, from which the optimizer's groups follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.parameter_groups import decays, role_of
from tests.helpers.choices import MODEL_CHOICES
from tests.helpers.models import TINY, VARIANTS


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
    with pytest.raises(AssertionError, match=f"parameter {name} has the roles"):
        role_of(name)
