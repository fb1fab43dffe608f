"""The fused kernels in triton's interpreter against float64, on odd sizes and every option."""

import sysconfig
from dataclasses import replace
from typing import Any

import pytest
import torch

from pretrain.kernels.triton import attention
from pretrain.kernels.triton.settings import missing_for_compiling, unsupported_reason
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.fused_attention_cases import CASES
from tests.helpers.models import TINY
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


class RecordedKernel:
    """In place of a kernel: notes what triton compiles one for, and computes nothing."""

    def __init__(self) -> None:
        self.variants: set[Any] = set()

    def __getitem__(self, grid: Any) -> Any:
        return lambda **arguments: self.variants.add(
            tuple((name, _compiled_for(value)) for name, value in sorted(arguments.items()))
        )


def _compiled_for(value: Any) -> Any:
    """Return what of an argument makes triton compile another kernel."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int and value != 1:
        return value % 16 == 0, value >= 1 << 31
    return value


@pytest.mark.parametrize("memory_length", [64, 50])
def test_texts_of_all_lengths_and_numbers_share_a_few_kernels(monkeypatch, memory_length):
    kernel = RecordedKernel()
    monkeypatch.setattr(attention, "forward_kernel", kernel)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # has the CPU take the path of a GPU
    config = replace(TINY, num_layers=1, d_model=64, num_heads=1, memory_length=memory_length)
    module = TransformerXL(config).to(torch.bfloat16)
    for length in range(1, 201):
        stream = new_stream(module, memory_length, 64, length + 2)
        tokens_BL = torch.zeros(1 + length % 8, length, dtype=torch.long)
        for part_BL in (*tokens_BL.split(64, dim=1), tokens_BL[:, :1], tokens_BL[:, :1]):
            stream.logits_BLV(part_BL, part_BL != 0, 1)
    assert 1 < len(kernel.variants) <= 12


def test_the_reason_for_not_using_the_kernel_is_given(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "NVIDIA GPU" in (unsupported_reason(torch.device("cpu")) or "")


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
