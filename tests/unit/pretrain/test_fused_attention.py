"""The fused kernels in triton's interpreter against float64, on odd sizes and every option."""

from __future__ import annotations

import sysconfig

import pytest
import torch

from pretrain.kernels.triton.settings import missing_for_compiling, unsupported_reason
from tests.helpers.fused_attention_cases import CASES
from tests.helpers.triton_interpreter import interpreted

# The 2-norm of the error over that of the exact value.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    """Errors by case and tensor."""
    return interpreted("tests.helpers.fused_attention_cases")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_agree_with_float64(errors, name):
    tolerance = TOLERANCE[CASES[name].dtype]
    for tensor, error in errors[name].items():
        assert error < tolerance, tensor


def test_the_reason_for_not_using_the_kernel_is_given(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs an NVIDIA GPU" in (unsupported_reason(torch.device("cpu")) or "")


def test_a_missing_compiler_or_header_is_named_before_triton_needs_it(monkeypatch, tmp_path):
    include = tmp_path / "include"
    include.mkdir()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(include))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in (missing_for_compiling.__wrapped__() or "")
    (tmp_path / "gcc").touch(mode=0o755)
    assert f"{include / 'Python.h'} is missing" in (missing_for_compiling.__wrapped__() or "")
    (include / "Python.h").touch()
    assert missing_for_compiling.__wrapped__() is None


@pytest.mark.slow
def test_the_model_takes_the_fused_path_and_agrees_with_plain_operations():
    found = interpreted("tests.helpers.fused_model")
    assert found["depends_on"] == {"neighbors": False, "dropout": True}
    for variant, error in found["errors"].items():
        assert 0.0 < error < 1e-5, (variant, error)  # zero would mean that both took the same path
