"""The gated delta rule in chunks against the recurrence, and the recurrence against the paper."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from pretrain.config.model import ModelConfig
from pretrain.model import gated_deltanet
from pretrain.model.gated_deltanet import (
    DeltaInputs,
    GatedDeltaNet,
    delta_rule,
    delta_rule_by_step,
    delta_rule_in_chunks,
    fla_delta_rule,
)

LANES, HEADS, KEY, VALUE = 2, 3, 6, 10
TENSORS = ("query_BLNH", "key_BLNH", "value_BLNX", "log_decay_BLN", "write_BLN")


def random_inputs(
    length: int, starts: tuple[int, ...] | None = None, seed: int = 0
) -> tuple[DeltaInputs, Tensor]:
    """Inputs and a state before them; the second lane's documents start one token later."""
    numbers = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=numbers)

    documents_BL = None
    if starts is not None:
        starts_BL = torch.zeros(LANES, length, dtype=torch.bool)
        for lane in range(LANES):
            starts_BL[lane, [(start + lane) % length for start in starts]] = True
        documents_BL = starts_BL.cumsum(1, dtype=torch.int32)
    inputs = DeltaInputs(
        query_BLNH=normalize(draw(LANES, length, HEADS, KEY), dim=-1),
        key_BLNH=normalize(draw(LANES, length, HEADS, KEY), dim=-1),
        value_BLNX=draw(LANES, length, HEADS, VALUE),
        log_decay_BLN=-draw(LANES, length, HEADS).abs(),
        write_BLN=draw(LANES, length, HEADS).sigmoid(),
        documents_BL=documents_BL,
    )
    return inputs, draw(LANES, HEADS, KEY, VALUE)


def results(compute: Any, inputs: DeltaInputs, state: Tensor, **options: Any) -> list[Tensor]:
    """What was read, the final state, and the gradients of a random sum of both."""
    leaves = [getattr(inputs, name).clone().requires_grad_() for name in TENSORS]
    leaves.append(state.clone().requires_grad_())
    changed = replace(inputs, **dict(zip(TENSORS, leaves[:-1], strict=True)))
    outputs = compute(changed, leaves[-1], **options)
    numbers = torch.Generator().manual_seed(9)
    weights = [torch.randn(each.shape, dtype=each.dtype, generator=numbers) for each in outputs]
    return [*(each.detach() for each in outputs), *torch.autograd.grad(outputs, leaves, weights)]


@pytest.mark.parametrize("starts", [None, (0,), (5, 6, 11), (0, 1, 2, 3, 7)], ids=str)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 29])
def test_chunks_of_any_size_compute_the_recurrence_with_its_gradients(
    length: int, starts: tuple[int, ...] | None
) -> None:
    inputs, state = random_inputs(length, starts)
    expected = results(delta_rule_by_step, inputs, state)
    for chunk_tokens in (1, 4, 8, 64):
        found = results(delta_rule_in_chunks, inputs, state, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_step_is_the_papers_formula() -> None:
    inputs, state_BNHX = random_inputs(1)
    alpha_BN11 = inputs.log_decay_BLN[:, 0, :, None, None].exp()
    beta_BN11 = inputs.write_BLN[:, 0, :, None, None]
    key_BNH1, value_BN1X = inputs.key_BLNH[:, 0, :, :, None], inputs.value_BLNX[:, 0, :, None]
    kept_BNHH = torch.eye(KEY, dtype=torch.float64) - beta_BN11 * key_BNH1 @ key_BNH1.mT
    expected_BNHX = alpha_BN11 * kept_BNHH @ state_BNHX + beta_BN11 * key_BNH1 @ value_BN1X
    read_BLNX, after_BNHX = delta_rule_by_step(inputs, state_BNHX)
    torch.testing.assert_close(after_BNHX, expected_BNHX)
    expected_BNX = torch.einsum("bnhx,bnh->bnx", expected_BNHX, inputs.query_BLNH[:, 0])
    torch.testing.assert_close(read_BLNX[:, 0], expected_BNX)


def test_a_document_is_read_as_if_nothing_came_before_bitwise() -> None:
    inputs, state = random_inputs(20, (13,))
    read, after = delta_rule_in_chunks(inputs, state, chunk_tokens=8)
    before = torch.arange(20)[None, :] < torch.tensor([[13], [14]])
    other = replace(
        inputs,
        value_BLNX=torch.where(before[:, :, None, None], 7.0, inputs.value_BLNX),
        log_decay_BLN=torch.where(before[:, :, None], -1.1, inputs.log_decay_BLN),
    )
    changed, changed_after = delta_rule_in_chunks(other, state + 1.0, chunk_tokens=8)
    assert torch.equal(read[~before], changed[~before])
    assert torch.equal(after, changed_after)
    assert not torch.equal(read[before], changed[before])


def test_equal_keys_without_decay_stay_exact_in_float32() -> None:
    """Powers of the triangular matrix, as a Neumann series has them, would reach 1e18 here."""
    inputs, state = random_inputs(128)
    key_BLNH = inputs.key_BLNH[:, :1].expand_as(inputs.key_BLNH)
    ones = torch.ones_like(inputs.write_BLN)
    inputs = replace(inputs, key_BLNH=key_BLNH, write_BLN=ones, log_decay_BLN=0.0 * ones)
    expected, _ = delta_rule_by_step(inputs, state)
    single = replace(inputs, **{name: getattr(inputs, name).float() for name in TENSORS})
    found, _ = delta_rule_in_chunks(single, state.float())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_gates_that_forget_everything_leave_finite_gradients() -> None:
    inputs, state = random_inputs(32)
    inputs = replace(inputs, log_decay_BLN=inputs.log_decay_BLN * 1e4)
    assert all(each.isfinite().all() for each in results(delta_rule_in_chunks, inputs, state))


def chunk_gated_delta_rule(
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNX: Tensor,
    g_BLN: Tensor,
    beta_BLN: Tensor,
    *,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor]:
    """What flash-linear-attention 0.6 documents of its function, and its plain code computes."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    q_BLNH, k_BLNH = (
        x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q_BLNH, k_BLNH)
    )
    state_BNHX, read = initial_state, []
    for t in range(q_BLNH.shape[1]):
        state_BNHX = state_BNHX * g_BLN[:, t].exp()[..., None, None]
        stored_BNX = torch.einsum("bnhx,bnh->bnx", state_BNHX, k_BLNH[:, t])
        update_BNX = beta_BLN[:, t, :, None] * (v_BLNX[:, t] - stored_BNX)
        state_BNHX = state_BNHX + torch.einsum("bnh,bnx->bnhx", k_BLNH[:, t], update_BNX)
        read.append(torch.einsum("bnhx,bnh->bnx", state_BNHX, q_BLNH[:, t] * scale))
    return torch.stack(read, dim=1), state_BNHX


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a package whose kernels need a GPU; tests/gpu has the kernels."""
    module = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gated_deltanet, "_has_fla", lambda: True)


@pytest.mark.parametrize("starts", [None, (5, 6, 11)], ids=str)
def test_a_layer_gives_fla_what_it_takes(fla, monkeypatch, starts) -> None:
    model = ModelConfig(vocab_size=8, d_model=12, num_heads=HEADS, layer_kinds=("deltanet",))
    layer, (inputs, _) = GatedDeltaNet(model, 0).double(), random_inputs(20, starts)
    outputs, numbers = [], torch.Generator().manual_seed(3)
    hidden_BLD = torch.randn(LANES, 20, 12, dtype=torch.float64, generator=numbers)
    state = torch.randn(LANES, HEADS, 4, 8, dtype=torch.float64, generator=numbers)
    tail = torch.zeros(LANES, 3, 48, dtype=torch.float64)
    for rule in (delta_rule, fla_delta_rule):
        monkeypatch.setattr(gated_deltanet, "delta_rule_for", lambda *_, rule=rule: rule)
        read, *carried = layer(hidden_BLD, state, tail, inputs.documents_BL, dropout=None)
        gradients = torch.autograd.grad(read.square().sum(), tuple(layer.parameters()))
        outputs.append([read.detach(), *carried, *gradients])
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
