"""Flash-linear-attention's kernels with their one configuration, in triton's interpreter."""

import pytest

from pretrain.kernels.flash_linear_attention import CONFIGURATIONS
from tests.helpers.triton_interpreter import interpreted


@pytest.mark.slow
def test_each_kernel_has_one_configuration_and_computes_the_rule_with_its_gradients() -> None:
    found = interpreted("tests.helpers.fla_interpreted")
    # All that ran are those that a resume compares.
    assert found["configurations"] == {name.split()[1]: 1 for name in CONFIGURATIONS}
    for widths, errors in found["errors"].items():
        assert max(errors) < 1e-4, (widths, errors)
