"""The model's contract: losses, memory, options, precision, checkpointing, initialization."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from pretrain.config.run import ModelConfig
from pretrain.errors import CheckpointError
from pretrain.model.dropout import DropoutStream
from pretrain.model.memory import MemoryLayout, num_rows
from pretrain.model.parameters import load_parameters
from pretrain.model.positions import RelativePositions, sinusoids_XD
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import (
    TINY,
    VARIANTS,
    random_starts,
    random_tokens,
    stream_nll,
    tiny_model,
)

ALL_VARIANTS = pytest.mark.parametrize("variant", VARIANTS)
ROUNDING = {torch.bfloat16: 0.05, torch.float16: 0.01}
DROPPING = {"dropout": 0.2, "attention_dropout": 0.1}


def gradients(model: TransformerXL) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def taught_by_segments_alone(model: TransformerXL) -> set[str]:
    """The parameters that get a gradient without any through memory: not of written tokens."""
    names = dict(model.named_parameters())
    return {name for name in names if not name.startswith("memory_tokens.norm.")}


def train_two_segments(model: TransformerXL, lanes: list[int], step: int = 3) -> torch.Tensor:
    """The NLL of two segments of the given lanes' streams, after backward through both."""
    stream_BT, starts_BT = random_tokens(8, 21)[lanes], random_starts(8, 21)[lanes]
    dropout = DropoutStream(seed=1, step=step, lanes=lanes)
    nll_BT, _ = stream_nll(model, stream_BT, [10, 10], starts_BT, dropout)
    nll_BT.sum().backward()
    return nll_BT.detach()


def test_memory_owns_its_rows_and_keeps_no_segment_alive() -> None:
    model = tiny_model()
    _, memory = model(random_tokens(2, 30), random_tokens(2, 30, 1))
    for part in memory:
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_without_starts_the_segment_continues_the_document_in_memory() -> None:
    model, stream_BT = tiny_model(isolate_documents=True), random_tokens(2, 17)
    none_start = torch.zeros(2, 17, dtype=torch.bool)
    found, expected = (stream_nll(model, stream_BT, [8, 8], each)[0] for each in (None, none_start))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("same_length", [False, True])
def test_a_calls_memory_length_acts_like_the_configured_one(same_length: bool) -> None:
    stream_BT = random_tokens(2, 25)
    for length in (4, 8, 16, 40):
        model = tiny_model(same_length=same_length)
        configured = tiny_model(same_length=same_length, memory_length=length)
        expected, expected_memory = stream_nll(configured, stream_BT, [8, 8, 8])
        nll_BT, memory = stream_nll(model, stream_BT, [8, 8, 8], memory_length=length)
        assert torch.equal(nll_BT, expected)
        assert num_rows(memory) == num_rows(expected_memory) == min(length, 24)


@pytest.mark.parametrize(
    "options", [{}, {"same_length": True}, {"compressed_length": 4, "compression_rate": 2}], ids=str
)
def test_memory_length_zero_sees_the_segment_alone(options: dict[str, Any]) -> None:
    model = tiny_model(**options)
    tokens_BL = random_tokens(2, 6)
    _, memory = stream_nll(model, random_tokens(2, 21), [10, 10])
    alone, empty = model(tokens_BL, tokens_BL, None, memory_length=0)
    assert all(part.shape[1] == 0 for part in empty)
    assert torch.equal(model(tokens_BL, tokens_BL, memory, memory_length=0)[0], alone)
    if "compressed_length" not in options:
        assert torch.equal(tiny_model(memory_length=0)(tokens_BL, tokens_BL)[0], alone)


@ALL_VARIANTS
def test_log_probabilities_sum_to_one_and_hold_the_loss(variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    tokens_BL, targets_BL = random_tokens(3, 7), random_tokens(3, 7, 1)
    starts_BL = random_starts(3, 7)
    nll_BL, memory = model(tokens_BL, targets_BL, None, starts_BL)
    logits_BLV, other_memory = model.logits_BLV(tokens_BL, None, starts_BL)
    assert logits_BLV.shape == (3, 7, TINY.vocab_size)
    torch.testing.assert_close(logits_BLV.exp().sum(-1), torch.ones(3, 7, dtype=torch.float64))
    torch.testing.assert_close(-logits_BLV.gather(2, targets_BL[:, :, None])[:, :, 0], nll_BL)
    assert all(torch.equal(a, b) for a, b in zip(memory, other_memory, strict=True))
    last_BLV, _ = model.logits_BLV(tokens_BL, None, starts_BL, num_last=2)
    torch.testing.assert_close(last_BLV, logits_BLV[:, -2:])


@pytest.mark.parametrize("variant", ["plain", "adaptive_div2", "rope"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_a_chunked_head_changes_neither_losses_nor_gradients(variant, chunk_tokens):
    whole = tiny_model(**VARIANTS[variant], **DROPPING)
    chunked = TransformerXL(whole.config, logits_chunk_tokens=chunk_tokens).double()
    chunked.load_state_dict(whole.state_dict())
    found, expected = train_two_segments(chunked, [0, 3, 5]), train_two_segments(whole, [0, 3, 5])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(chunked), gradients(whole), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cutoffs", [(), (10, 30)], ids=str)
@pytest.mark.parametrize("target", [-100, -1, TINY.vocab_size])
def test_a_target_that_is_no_token_is_refused_and_not_given_a_loss_of_0(target, cutoffs) -> None:
    model = TransformerXL(replace(TINY, cutoffs=cutoffs))
    tokens_BL = random_tokens(2, 5)
    targets_BL = tokens_BL.clone()
    targets_BL[1, 2] = target
    with pytest.raises(IndexError, match=str(target)):
        model(tokens_BL, targets_BL)


@pytest.mark.parametrize("options", [{}, {"cutoffs": (10, 30), "div_val": 2}], ids=str)
def test_in_bf16_the_error_of_gradients_does_not_grow_with_the_number_of_chunks(options):
    num_tokens = 2048
    config = ModelConfig(vocab_size=50, d_model=16, num_heads=2, **options)
    torch.manual_seed(1)
    hidden_BLD = torch.randn(1, num_tokens, config.d_model).bfloat16()
    targets_BL = torch.randint(0, 50, (1, num_tokens)) // 3  # the front is frequent

    def error_in(num_chunks: int, reference: TransformerXL) -> float:
        head = TransformerXL(config, logits_chunk_tokens=num_tokens // num_chunks).head
        head.load_state_dict(reference.head.state_dict())
        head.bfloat16()(hidden_BLD, targets_BL).sum().backward()
        errors = [
            (found.grad.double() - exact.grad).norm() / exact.grad.norm()
            for found, exact in zip(head.parameters(), reference.head.parameters(), strict=True)
            if found.grad is not None and exact.grad is not None
        ]
        assert len(errors) >= 2
        return float(max(errors))

    reference = TransformerXL(config).bfloat16().double()
    reference.head(hidden_BLD.double(), targets_BL).sum().backward()
    errors = {num_chunks: error_in(num_chunks, reference) for num_chunks in (1, 8, 128)}
    assert max(errors.values()) < 0.01, errors


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[3], [1], [0, 2]], [[3, 2, 1, 0]]])
def test_dropout_does_not_depend_on_the_micro_batches(groups: list[list[int]]) -> None:
    whole = tiny_model(**DROPPING)
    nll_BT = train_two_segments(whole, [0, 1, 2, 3])
    cut = tiny_model(**DROPPING)
    for lanes in groups:
        found_BT = train_two_segments(cut, lanes)
        torch.testing.assert_close(found_BT, nll_BT[lanes], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(cut), gradients(whole), rtol=0, atol=1e-11)
    plain = tiny_model()
    assert (train_two_segments(plain, [0, 1, 2, 3]) - nll_BT).abs().max() > 1e-2
    assert (train_two_segments(whole, [0, 1, 2, 3], step=4) - nll_BT).abs().max() > 1e-2


def test_training_uses_no_random_number_state() -> None:
    model = tiny_model(**DROPPING)
    model.activation_checkpointing = "full"
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = train_two_segments(model, [0, 1])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(train_two_segments(model, [0, 1]), first)


def test_dropout_acts_in_training_mode_with_a_stream_only() -> None:
    model = tiny_model(**DROPPING)
    tokens_BL = random_tokens(2, 6)
    stream = DropoutStream(1, 2, [0, 1])
    plain = tiny_model()(tokens_BL, tokens_BL)[0]
    assert torch.equal(model(tokens_BL, tokens_BL)[0], plain)
    assert not torch.equal(model(tokens_BL, tokens_BL, dropout=stream)[0], plain)
    assert torch.equal(model.eval()(tokens_BL, tokens_BL, dropout=stream)[0], plain)


@pytest.mark.parametrize(("variant", "dtype"), list(zip(VARIANTS, cycle(ROUNDING))))
def test_half_precision_runs_with_float32_losses_close_to_the_exact_ones(variant, dtype):
    exact = tiny_model(**VARIANTS[variant], init_std=0.02)
    torch.manual_seed(0)
    exact = TransformerXL(replace(exact.config)).double()
    rounded = TransformerXL(exact.config)
    load_parameters(rounded, dict(exact.named_parameters()))
    rounded = rounded.to(dtype)
    stream_BT, starts_BT = random_tokens(2, 25), random_starts(2, 25)
    expected, _ = stream_nll(exact, stream_BT, [8, 8, 8], starts_BT)
    dropout = DropoutStream(1, 2, [0, 1])
    found, memory = stream_nll(rounded, stream_BT, [8, 8, 8], starts_BT, dropout)
    assert found.dtype == torch.float32
    for part, tensor in zip(MemoryLayout(rounded.config).parts, memory, strict=True):
        if tensor.is_floating_point():
            assert tensor.dtype == (torch.float32 if part.in_float32 else dtype)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=ROUNDING[dtype])
    found.mean().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(rounded).values())
    assert gradients(rounded).keys() == taught_by_segments_alone(rounded)


def test_encodings_stay_distinct_when_rounded_to_bfloat16() -> None:
    encodings_CD = RelativePositions(1024, 0).encodings_CD(768, torch.bfloat16, torch.device("cpu"))
    exact_CD = sinusoids_XD(torch.arange(767, -1, -1, dtype=torch.float64), 1024)
    assert len(encodings_CD.unique(dim=0)) == 768
    torch.testing.assert_close(encodings_CD.double(), exact_CD, rtol=0, atol=2**-8)


def test_a_table_made_during_inference_serves_training() -> None:
    model = tiny_model()
    with torch.inference_mode():
        model(random_tokens(2, 6), random_tokens(2, 6))
    model(random_tokens(2, 6), random_tokens(2, 6))[0].mean().backward()


def test_initialization_is_the_published_one_and_repeats_with_the_seed() -> None:
    sizes = {"vocab_size": 500, "num_layers": 2, "d_model": 128, "num_heads": 4, "d_embed": 64}
    config = ModelConfig(**sizes, tie_embeddings=False, init_std=0.03)
    torch.manual_seed(0)
    model = TransformerXL(config)
    for name, parameter in model.named_parameters():
        mean, std = parameter.mean().item(), parameter.std().item()
        published = 1.0 if name.endswith("gain") else 0.0
        expected = 0.01 if name.endswith("projection") else 0.03
        if name.endswith((".bias", "inner_bias", "output_bias", "cluster_bias")):
            assert parameter.abs().max() == 0, name
        else:
            assert abs(mean - published) < 5 * expected / parameter.numel() ** 0.5, name
            assert abs(std / expected - 1) < 5 / (2 * parameter.numel()) ** 0.5, name
    torch.manual_seed(0)
    again = dict(TransformerXL(config).named_parameters())
    assert all(torch.equal(parameter, again[name]) for name, parameter in model.named_parameters())


def test_parameters_of_another_model_are_refused_by_name() -> None:
    model = tiny_model()
    tensors = dict(tiny_model(d_inner=20).named_parameters())
    with pytest.raises(CheckpointError, match=r"feed_forward\.inner_weight"):
        load_parameters(model, tensors)
    del tensors["content_bias"]
    with pytest.raises(CheckpointError, match="content_bias"):
        load_parameters(model, tensors)
