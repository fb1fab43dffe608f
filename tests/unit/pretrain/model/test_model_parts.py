"""Each part against its definition: positions, norms, feed-forward, compression, delta rule."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from pretrain.config.model import FEED_FORWARDS, FeedForwardKind
from pretrain.config.run import ModelConfig
from pretrain.mixers.deltanet import module as gated_deltanet
from pretrain.mixers.deltanet.delta_rule import (
    DeltaInputs,
    delta_rule,
    delta_rule_by_step,
    delta_rule_in_chunks,
    fla_delta_rule,
)
from pretrain.mixers.deltanet.module import GatedDeltaNet
from pretrain.model.feed_forward import FeedForward
from pretrain.model.memory import num_leaving_rows
from pretrain.model.memory_modules import Compression
from pretrain.model.parameters import RMSNorm
from pretrain.model.positions import (
    DistanceBias,
    alibi_slopes_N,
    rotated_BXNH,
    sinusoids_XD,
    t5_buckets,
)
from pretrain.model.transformer_xl import TransformerXL
from pretrain.model.visibility import Visibility
from tests.helpers.models import TINY, random_starts, random_tokens, stream_nll, tiny_model

COMPRESSIVE = {"compressed_length": 4, "compression_rate": 2, "memory_length": 6}


def gradients_of(model: TransformerXL) -> dict[str, Tensor]:
    """After backward through the last of four segments of 4 tokens."""
    tokens_BT, targets_BT = random_tokens(2, 16), random_tokens(2, 16, 1)
    memory = None
    for tokens_BL, targets_BL in zip(tokens_BT.split(4, 1), targets_BT.split(4, 1), strict=True):
        model.zero_grad()
        nll_BL, memory = model(tokens_BL, targets_BL, memory)
        nll_BL.mean().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("window", "documents", "num_queries", "num_keys"),
    [(0, False, 6, 15), (0, True, 6, 6), (1, True, 1, 8), (5, True, 6, 15), (20, False, 6, 6)],
)
def test_queries_are_scaled_by_the_log_of_their_keys(window, documents, num_queries, num_keys):
    of_keys_BC = random_starts(3, num_keys).cumsum(1, dtype=torch.int32) - 2
    keys = {"num_keys": num_keys, "documents_BC": of_keys_BC if documents else None}
    kind = {"dtype": torch.float64, "device": torch.device("cpu")}
    visibility = Visibility(num_queries=num_queries, window=window, **keys, **kind)
    seen_BLC = (visibility.mask == 0).expand(3, num_queries, num_keys)
    rows_BLD = torch.randn(3, num_queries, 16, dtype=torch.float64)
    models = (tiny_model(softmax_scaling=scaling) for scaling in ("none", "log_length"))
    attentions = [model.layers[0].attention for model in models]
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
    rotated, plain = (
        torch.view_as_complex(torch.stack(each.chunk(2, -1), -1))
        for each in (rotated_BXNH(values, sinusoids_XD(distances, 6)), values)
    )
    frequencies = 10_000.0 ** (-torch.arange(3, dtype=torch.float64) * 2 / 6)
    turns = torch.exp(-1j * distances[:, None] * frequencies)[:, None]
    torch.testing.assert_close(rotated, plain * turns)


def test_linear_biases_have_the_published_slopes() -> None:
    cpu = torch.device("cpu")
    assert alibi_slopes_N(8, cpu).tolist() == [2.0**-power for power in range(1, 9)]
    assert alibi_slopes_N(2, cpu).tolist() == [2.0**-4, 2.0**-8]
    assert alibi_slopes_N(6, cpu).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    bias_CN = DistanceBias(ModelConfig(positions="alibi", num_heads=2))(4, torch.float32, cpu)
    assert bias_CN[:, 0].tolist() == [-3 / 16, -2 / 16, -1 / 16, 0.0]


def test_buckets_are_single_distances_then_logarithmic() -> None:
    buckets = t5_buckets(torch.arange(300), 32, 128)
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
    kept: list[Tensor] = []  # all, so that no storage is used again
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        layer(torch.randn(2, 4, 6, requires_grad=True), dropout=None)
    inner = {each.data_ptr() for each in kept if each.numel() == 2 * 4 * 10}
    assert len(inner) == FEED_FORWARDS[kind].inner_tensors


def test_z_loss_changes_gradients_but_not_the_loss_shown() -> None:
    plain, drawn = tiny_model(), tiny_model(z_loss=0.1)
    tokens_BL, targets_BL = random_tokens(2, 6), random_tokens(2, 6, 1)
    nll_BL = plain(tokens_BL, targets_BL)[0]
    assert torch.equal(nll_BL, drawn(tokens_BL, targets_BL)[0])
    log_sums = plain.head.bins[0](plain.hidden_states(tokens_BL)[0]).logsumexp(-1)
    (nll_BL + 0.1 * log_sums.square()).mean().backward()
    drawn(tokens_BL, targets_BL)[0].mean().backward()
    for (name, one), other in zip(plain.named_parameters(), drawn.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    found, expected = (gradients_of(tiny_model(cutoffs=(9, 20), z_loss=z)) for z in (0.1, 0.0))
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


def taught(model: TransformerXL, error: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the convolutions that reconstruction teaches."""
    learned = [each for each in model.compressions.parameters() if each.requires_grad]
    return torch.autograd.grad(error, learned, materialize_grads=True)


@pytest.mark.parametrize(("start", "length"), [(1, 8), (3, 8), (8, 8), (8, 4)])
def test_reconstruction_of_an_isolated_document_is_bitwise_blind_to_the_one_before(start, length):
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
            gradients = [each.flatten() for each in taught(model, error)]
            results[isolated].append((error.item(), torch.cat(gradients)))
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

    def reconstruction(rows: slice) -> tuple[Tensor, tuple[Tensor, ...]]:
        _, memory = stream_nll(model, stream_BT[rows, :9], [8], starts_BT[rows])
        _, _, error = model.hidden_states(stream_BT[rows, 8:16], memory, starts_BT[rows, 8:16])
        return error, taught(model, error)

    whole, gradients = reconstruction(slice(0, 4))
    slots = [reconstruction(slice(first, first + lanes)) for first in range(0, 4, lanes)]
    assert len({round(error.item(), 9) for error, _ in slots}) > 1
    torch.testing.assert_close(torch.stack([error for error, _ in slots]).mean(), whole)
    for gradient, *parts in zip(gradients, *[found for _, found in slots], strict=True):
        torch.testing.assert_close(torch.stack(parts).mean(0), gradient, rtol=1e-10, atol=1e-14)


def compress_to_means(model: TransformerXL) -> None:
    """Set the convolution's weights so that each compressed row is the mean of its two."""
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
    torch.testing.assert_close(memory[1][:, 1], model.embedding(stream_BT[:, 3]) / 2)
    assert memory[2].tolist() == [[-1, 0, 0]]


@settings(max_examples=100, deadline=None)
@given(
    segments=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    memory_length=st.integers(1, 15),
    rate=st.integers(1, 5),
)
def test_rows_leave_in_whole_groups_for_any_segments(segments, memory_length, rate):
    recent, gone, total = 0, 0, 0
    for length in segments:
        total += length
        leaving = num_leaving_rows(recent, length, memory_length, rate)
        recent, gone = recent + length - leaving, gone + leaving
        assert leaving % rate == 0
        assert recent < memory_length + rate
        assert gone == 0 or recent >= memory_length
        assert recent + gone == total


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
def test_chunks_of_any_size_compute_the_recurrence_with_its_gradients(length, starts):
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
    q_BLNH, k_BLNH, v_BLNX, g_BLN, beta_BLN, *, scale, initial_state, **flags: bool
) -> tuple[Tensor, Tensor]:
    """What flash-linear-attention 0.6 documents of its function, and its plain code computes."""
    assert flags == {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    q_BLNH, k_BLNH = (
        x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q_BLNH, k_BLNH)
    )
    inputs = DeltaInputs(q_BLNH * scale, k_BLNH, v_BLNX, g_BLN, beta_BLN, None)
    return delta_rule_by_step(inputs, initial_state)


@pytest.mark.parametrize("starts", [None, (5, 6, 11)], ids=str)
def test_a_layer_gives_fla_what_it_takes(monkeypatch, starts) -> None:
    # Kernels of the package: tests/integration/test_delta_rule_kernels.py.
    monkeypatch.setattr(
        "pretrain.mixers.deltanet.delta_rule.chunk_gated_delta_rule", lambda: chunk_gated_delta_rule
    )
    model = ModelConfig(vocab_size=8, d_model=12, num_heads=HEADS, layer_kinds=("deltanet",))
    layer, (inputs, _) = GatedDeltaNet(model, 0).double(), random_inputs(20, starts)
    outputs, numbers = [], torch.Generator().manual_seed(3)
    hidden_BLD = torch.randn(LANES, 20, 12, dtype=torch.float64, generator=numbers)
    state = torch.randn(LANES, HEADS, 4, 8, dtype=torch.float64, generator=numbers)
    tail = torch.zeros(LANES, 3, 48, dtype=torch.float64)
    for rule in (delta_rule, fla_delta_rule):
        monkeypatch.setattr(gated_deltanet, "delta_rule_for", lambda *_, rule=rule: rule)
        read, *carried = layer(hidden_BLD, state, tail, inputs.documents_BL)
        gradients = torch.autograd.grad(read.square().sum(), tuple(layer.parameters()))
        outputs.append([read.detach(), *carried, *gradients])
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
