"""Each part against its definition: positions, norms, feed-forward, z-loss, compression."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretrain.config.choices import FEED_FORWARDS, FeedForwardKind
from pretrain.config.model import ModelConfig
from pretrain.model.attention_paths import Visibility
from pretrain.model.layer import FeedForward
from pretrain.model.memory import Compression, num_leaving_rows
from pretrain.model.parameters import RMSNorm
from pretrain.model.positions import (
    DistanceBias,
    alibi_slopes_N,
    rotated_BXNH,
    sinusoids_XD,
    t5_buckets_of,
)
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import TINY, random_starts, random_tokens, stream_nll, tiny_model

COMPRESSIVE = {"compressed_length": 4, "compression_rate": 2, "memory_length": 6}


def gradients_of(model: TransformerXL, segments: int = 4) -> dict[str, Tensor]:
    """After backward through the last of some segments of 4 tokens."""
    stream_BT = random_tokens(2, 4 * segments + 1)
    memory = None
    for first in range(0, 4 * segments, 4):
        model.zero_grad()
        nll_BL, memory = model(
            stream_BT[:, first : first + 4], stream_BT[:, first + 1 : first + 5], memory
        )
        nll_BL.mean().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("window", "documents", "num_queries", "num_keys"),
    [(0, False, 6, 15), (0, True, 6, 6), (1, True, 1, 8), (5, True, 6, 15), (20, False, 6, 6)],
)
def test_queries_are_scaled_by_the_logarithm_of_the_keys_they_see(
    window: int, documents: bool, num_queries: int, num_keys: int
) -> None:
    of_keys_BC = random_starts(3, num_keys).cumsum(1, dtype=torch.int32) - 2
    visibility = Visibility(
        num_queries=num_queries,
        num_keys=num_keys,
        window=window,
        documents_BC=of_keys_BC if documents else None,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    seen_BLC = (visibility.mask == 0).expand(3, num_queries, num_keys)
    rows_BLD = torch.randn(3, num_queries, 16, dtype=torch.float64)
    attentions = [
        tiny_model(softmax_scaling=scaling).layers[0].attention
        for scaling in ("none", "log_length")
    ]
    attentions[0].query_weight = attentions[1].query_weight
    plain, scaled = (
        each.queries(each.projected_queries(rows_BLD), rows_BLD[0], visibility)
        for each in attentions
    )
    factors_BLN = seen_BLC.sum(2).double().log()[:, :, None] * attentions[1].length_scale
    torch.testing.assert_close(scaled, plain * factors_BLN[..., None], rtol=1e-12, atol=1e-12)


def test_rotation_is_the_complex_product_of_roformer() -> None:
    values = torch.randn(1, 7, 2, 6, dtype=torch.float64)
    distances = torch.arange(6, -1, -1, dtype=torch.float64)
    rotated = torch.view_as_complex(
        torch.stack(rotated_BXNH(values, sinusoids_XD(distances, 6)).chunk(2, -1), -1)
    )
    frequencies = 10_000.0 ** (-torch.arange(3, dtype=torch.float64) * 2 / 6)
    turns = torch.exp(-1j * distances[:, None] * frequencies)[:, None]
    torch.testing.assert_close(
        rotated, torch.view_as_complex(torch.stack(values.chunk(2, -1), -1)) * turns
    )


def test_linear_biases_have_the_published_slopes() -> None:
    cpu = torch.device("cpu")
    assert alibi_slopes_N(8, cpu).tolist() == [2.0**-power for power in range(1, 9)]
    assert alibi_slopes_N(2, cpu).tolist() == [2.0**-4, 2.0**-8]
    assert alibi_slopes_N(6, cpu).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    bias_CN = DistanceBias(ModelConfig(positions="alibi", num_heads=2))(4, torch.float32, cpu)
    assert bias_CN[:, 0].tolist() == [-3 / 16, -2 / 16, -1 / 16, 0.0]


def test_buckets_are_single_distances_then_logarithmic() -> None:
    buckets = t5_buckets_of(torch.arange(300), 32, 128)
    assert buckets[:17].tolist() == list(range(17))
    assert buckets[127].item() == 31
    assert (buckets[128:] == 31).all()
    assert (buckets.diff() >= 0).all()
    assert len(buckets.unique()) == 32
    # 16 + floor(16 log(d / 16) / log(8)): the first distance of each power of two is where it
    # should be
    assert [buckets[distance].item() for distance in (32, 64)] == [16 + 5, 16 + 10]


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm, values = RMSNorm(8).double(), torch.randn(3, 8, dtype=torch.float64)
    expected = values / values.square().mean(-1, keepdim=True).add(1e-5).sqrt()
    torch.testing.assert_close(norm(values), expected)


@pytest.mark.parametrize("options", [{}, {"norm": "rmsnorm", "positions": "rope"}], ids=str)
def test_memory_passes_the_norm_before_attention_as_the_segment_does(options: Any) -> None:
    """Losses and gradients are those of one product with normalized rows."""
    model = tiny_model(**options, norm_position="pre", query_key_norm=True)
    found = gradients_of(model)
    for layer in model.layers:
        norm = layer.attention_norm
        norm.forward = lambda rows, apart=False, whole=norm.forward: (
            (whole(rows), None, None) if apart else whole(rows)
        )
    torch.testing.assert_close(found, gradients_of(model), rtol=1e-11, atol=1e-13)


ACTIVATIONS = {
    "relu": lambda inner, _: inner.clamp(min=0),
    "relu2": lambda inner, _: inner.clamp(min=0) ** 2,
    "gelu": lambda inner, _: inner * (1 + torch.erf(inner / math.sqrt(2))) / 2,
    "swiglu": lambda inner, gate: gate * torch.sigmoid(gate) * inner,
}


@pytest.mark.parametrize("kind", get_args(FeedForwardKind))
def test_feed_forward_is_its_formula(kind) -> None:
    layer = FeedForward(
        ModelConfig(d_model=6, num_heads=2, d_inner=10, feed_forward=kind, init_std=0.5), 0
    ).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    inner = x @ layer.inner_weight.T
    gate = x @ layer.gate_weight.T if hasattr(layer, "gate_weight") else None
    expected = ACTIVATIONS[kind](inner, gate) @ layer.output_weight.T
    torch.testing.assert_close(layer(x, dropout=None), expected)


@pytest.mark.parametrize("kind", get_args(FeedForwardKind))
def test_feed_forward_keeps_as_many_inner_tensors_as_its_traits_say(kind) -> None:
    layer = FeedForward(ModelConfig(d_model=6, num_heads=2, d_inner=10, feed_forward=kind), 0)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 2 * 4 * 10:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(2, 4, 6, requires_grad=True), dropout=None)
    assert len(kept) == FEED_FORWARDS[kind].inner_tensors


@pytest.mark.parametrize("cutoffs", [(), (9, 20)])
def test_z_loss_changes_gradients_but_not_the_loss_shown(cutoffs: tuple[int, ...]) -> None:
    plain, drawn = tiny_model(cutoffs=cutoffs), tiny_model(cutoffs=cutoffs, z_loss=0.1)
    tokens_BL, targets_BL = random_tokens(2, 6), random_tokens(2, 6, 1)
    assert torch.equal(plain(tokens_BL, targets_BL)[0], drawn(tokens_BL, targets_BL)[0])
    if not cutoffs:
        hidden_BLD, _, _ = plain.hidden_states(tokens_BL)
        log_sums = plain.head.bins[0](hidden_BLD).logsumexp(-1)
        (plain(tokens_BL, targets_BL)[0] + 0.1 * log_sums.square()).mean().backward()
        drawn(tokens_BL, targets_BL)[0].mean().backward()
        for (name, one), other in zip(plain.named_parameters(), drawn.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, msg=name)
    else:
        found, expected = gradients_of(drawn), gradients_of(plain)
        assert any(not torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_position": "pre", "norm": "rmsnorm", "query_key_norm": True},
        {"attention_sinks": True, "softmax_scaling": "log_length"},
    ],
    ids=str,
)
def test_reconstruction_teaches_the_convolution_and_nothing_else(options) -> None:
    model = tiny_model(**COMPRESSIVE, **options)
    found = gradients_of(model)
    convolutions = {name for name in found if name.startswith("compressions.")}
    assert convolutions == {
        f"compressions.{layer}.{part}" for layer in range(2) for part in ("weight", "bias")
    }
    assert all(found[name].abs().max() > 0 for name in convolutions)
    # The same model whose compressed rows are made by a convolution that learns nothing: every
    # other gradient is equal.
    still = tiny_model(**COMPRESSIVE, **options)
    for compression in still.compressions or ():
        for name in ("weight", "bias"):
            getattr(compression, name).requires_grad_(False)
    expected = gradients_of(still)
    assert expected.keys() == found.keys() - convolutions
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("start", "length"), [(1, 8), (3, 8), (8, 8), (8, 4)])
def test_reconstruction_of_an_isolated_document_is_bitwise_blind_to_the_one_before(
    start: int, length: int
) -> None:
    """The second segment is one document, which begins at or before its first token."""
    stream_BT, starts_BT = random_tokens(2, 17), torch.zeros(2, 17, dtype=torch.bool)
    starts_BT[:, start] = True
    other_BT = stream_BT.clone()
    other_BT[:, :start] = (other_BT[:, :start] + 7) % 37
    second, results = slice(8, 8 + length), {}
    for isolated in (True, False):
        model = tiny_model(**COMPRESSIVE, isolate_documents=isolated)
        results[isolated] = []
        for tokens_BT in (stream_BT, other_BT):
            _, memory = stream_nll(model, tokens_BT[:, :9], [8], starts_BT)
            _, _, error = model.hidden_states(tokens_BT[:, second], memory, starts_BT[:, second])
            assert error is not None
            model.zero_grad()
            error.backward()
            assert model.compressions is not None
            gradients = [each.grad.clone() for each in model.compressions.parameters()
                         if each.grad is not None]  # fmt: skip
            results[isolated].append((error.item(), torch.cat([g.flatten() for g in gradients])))
    (error, gradient), (other_error, other_gradient) = results[True]
    assert error == other_error
    assert torch.equal(gradient, other_gradient)
    assert (error == 0) == (length == 4)  # then every leaving row is of the document before
    assert results[False][0][0] != results[False][1][0]


@pytest.mark.parametrize("lanes", [1, 2])
def test_reconstruction_is_the_same_for_any_grouping_of_lanes(lanes: int) -> None:
    """Slots and ranks are averaged with equal weights; documents leave each lane other queries."""
    model = tiny_model(**COMPRESSIVE, isolate_documents=True)
    stream_BT, starts_BT = random_tokens(4, 17), random_starts(4, 17)
    starts_BT[:2, 8] = True  # in these lanes no query sees a compressed row

    def reconstruction(rows: slice) -> tuple[Tensor, list[Tensor]]:
        _, memory = stream_nll(model, stream_BT[rows, :9], [8], starts_BT[rows])
        _, _, error = model.hidden_states(stream_BT[rows, 8:16], memory, starts_BT[rows, 8:16])
        assert error is not None
        assert model.compressions is not None
        return error, list(torch.autograd.grad(error, [
            each for each in model.compressions.parameters() if each.requires_grad
        ], allow_unused=True))  # fmt: skip

    whole, gradients = reconstruction(slice(0, 4))
    slots = [reconstruction(slice(first, first + lanes)) for first in range(0, 4, lanes)]
    assert len({round(error.item(), 9) for error, _ in slots}) > 1
    torch.testing.assert_close(torch.stack([error for error, _ in slots]).mean(), whole)
    for gradient, *parts in zip(gradients, *[found for _, found in slots], strict=True):
        if gradient is not None:
            torch.testing.assert_close(torch.stack(parts).mean(0), gradient, rtol=1e-10, atol=1e-14)


def compress_to_means(model: TransformerXL) -> None:
    """Set the convolution's weights so that each compressed row is the mean of its two."""
    assert model.compressions is not None
    compression = model.compressions[0]
    assert isinstance(compression, Compression)
    half = torch.eye(TINY.d_model, dtype=compression.weight.dtype) / 2
    compression.weight.data.copy_(torch.cat([half, half], dim=1))
    compression.bias.data.zero_()


def test_compressed_rows_are_those_of_the_formula() -> None:
    model = tiny_model(**COMPRESSIVE, num_layers=1)
    compress_to_means(model)
    stream_BT, starts_BT = random_tokens(2, 17), random_starts(2, 17)
    _, memory = stream_nll(model, stream_BT, [16], starts_BT)
    assert memory is not None
    embedded_BTD = model.embedding(stream_BT[:, :16])
    recent_BMD, compressed_BKD, compressed_documents_BK, documents_BM = memory
    assert torch.equal(recent_BMD, embedded_BTD[:, 10:])
    torch.testing.assert_close(compressed_BKD, embedded_BTD[:, 2:10].unflatten(1, (4, 2)).mean(2))
    counted_BT = starts_BT[:, :16].cumsum(1) - starts_BT[:, :16].sum(1, keepdim=True)
    assert torch.equal(documents_BM.long(), counted_BT[:, 10:])
    assert torch.equal(compressed_documents_BK.long(), counted_BT[:, 3:10:2])


def test_an_isolated_documents_compressed_row_holds_its_own_tokens_alone() -> None:
    model = tiny_model(**COMPRESSIVE, num_layers=1, isolate_documents=True)
    compress_to_means(model)
    stream_BT, starts_BT = random_tokens(1, 13), torch.zeros(1, 13, dtype=torch.bool)
    starts_BT[:, 3] = True  # the second token of the second group
    _, memory = stream_nll(model, stream_BT, [12], starts_BT)
    assert memory is not None
    torch.testing.assert_close(memory[1][:, 1], model.embedding(stream_BT[:, 3]) / 2)
    assert memory[2].tolist() == [[-1, 0, 0]]


@settings(max_examples=100, deadline=None)
@given(
    segments=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    memory_length=st.integers(1, 15),
    rate=st.integers(1, 5),
)
def test_rows_leave_in_whole_groups_for_any_segments(
    segments: list[int], memory_length: int, rate: int
) -> None:
    recent, gone, total = 0, 0, 0
    for length in segments:
        total += length
        leaving = num_leaving_rows(recent, length, memory_length, rate)
        recent, gone = recent + length - leaving, gone + leaving
        assert leaving % rate == 0
        assert recent < memory_length + rate
        assert gone == 0 or recent >= memory_length
        assert recent + gone == total


def test_without_memory_nothing_compressed_is_seen_either() -> None:
    model = tiny_model(**COMPRESSIVE)
    tokens_BL = random_tokens(2, 6)
    _, memory = stream_nll(model, random_tokens(2, 21), [10, 10])
    alone, empty = model(tokens_BL, tokens_BL, None, memory_length=0)
    assert torch.equal(model(tokens_BL, tokens_BL, memory, memory_length=0)[0], alone)
    assert all(part.shape[1] == 0 for part in empty)
