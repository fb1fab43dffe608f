"""Every combination of variants keeps the recurrence, with either attention."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any, get_args

import pytest
import torch

from pretrain.config.choices import (
    CompressionKind,
    FeedForwardKind,
    NormKind,
    NormPosition,
    Positions,
)
from pretrain.config.model import ModelConfig
from pretrain.model.dropout import DropoutStream
from pretrain.model.lane_state import num_rows
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import random_starts, random_tokens, stream_nll, tiny_model

LENGTH = 12
MEMORIES: dict[str, dict[str, Any]] = {
    "rows": {},
    "deltanet": {"layer_kinds": ("deltanet", "attention")},
    "tokens": {"layer_kinds": ("attention", "deltanet"), "memory_tokens": 2},
    **{
        kind: {"compressed_length": 3, "compression_rate": rate, "compression": kind}
        for kind, rate in zip(get_args(CompressionKind), cycle((2, 3)))
    },
}
EVERY_POSITION = pytest.mark.parametrize("positions", get_args(Positions))
EVERY_MEMORY = pytest.mark.parametrize("memory_kind", MEMORIES)
SMALL = {
    "d_model": 8,
    "num_heads": 2,
    "d_head": 4,
    "d_inner": 10,
}


def combinations(positions: str, memory_kind: str) -> list[dict[str, Any]]:
    """Return every choice of norm, feed-forward, key heads and query-key norm for two others."""
    named = (get_args(choice) for choice in (NormKind, NormPosition, FeedForwardKind))
    choices = product(*named, (1, 2), (False, True))
    names = ("norm", "norm_position", "feed_forward", "num_key_heads", "query_key_norm")
    given = {**SMALL, "positions": positions, **MEMORIES[memory_kind]}
    return [{**given, **dict(zip(names, choice, strict=True))} for choice in choices]


@EVERY_POSITION
@pytest.mark.parametrize("memory_kind", ["rows", "conv", "deltanet"])
def test_with_memory_as_long_as_the_stream_segment_length_does_not_matter(
    positions: str, memory_kind: str
) -> None:
    stream_BT, starts_BT = random_tokens(2, LENGTH + 1), random_starts(2, LENGTH + 1)
    for options in combinations(positions, memory_kind):
        model = tiny_model(**options, memory_length=LENGTH)
        whole, _ = stream_nll(model, stream_BT, [LENGTH], starts_BT)
        for lengths in ([3, 3, 3, 3], [1, 5, 4, 2]):
            cut, _ = stream_nll(model, stream_BT, lengths, starts_BT)
            torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12, msg=str(options))


@EVERY_POSITION
def test_segment_length_does_not_matter_to_1e_5_in_float32(positions: str) -> None:
    stream_BT = random_tokens(2, 65)
    for options in combinations(positions, "rows")[::5]:
        torch.manual_seed(0)
        model = TransformerXL(ModelConfig(vocab_size=37, num_layers=3, memory_length=64, **options))
        whole, _ = stream_nll(model, stream_BT, [64])
        for length in (1, 7):
            lengths = [length] * (64 // length) + [64 % length] * (64 % length > 0)
            torch.testing.assert_close(
                stream_nll(model, stream_BT, lengths)[0], whole, rtol=0, atol=1e-5
            )


@EVERY_POSITION
@EVERY_MEMORY
def test_a_lane_does_not_depend_on_the_text_of_others(positions: str, memory_kind: str) -> None:
    stream_BT, starts_BT = random_tokens(4, LENGTH + 1), random_starts(4, LENGTH + 1)
    other_BT, other_starts_BT = stream_BT.clone(), starts_BT.clone()
    # In place: CPUs may round a row of a matrix product by its place in the batch.
    others, order = [0, 3], [2, 1]
    other_BT[[1, 2]], other_starts_BT[[1, 2]] = stream_BT[order], starts_BT[order]
    for options in combinations(positions, memory_kind)[::3]:
        model = tiny_model(**options, memory_length=4)
        before, memory = stream_nll(model, stream_BT, [4, 4, 4], starts_BT)
        after, after_memory = stream_nll(model, other_BT, [4, 4, 4], other_starts_BT)
        assert memory is not None
        assert after_memory is not None
        for part, other in zip((before, *memory), (after, *after_memory), strict=True):
            assert torch.equal(other[others], part[others]), options
            torch.testing.assert_close(other[[1, 2]], part[order], rtol=0, atol=1e-12)


@EVERY_POSITION
@EVERY_MEMORY
def test_no_token_sees_the_future_bitwise(positions: str, memory_kind: str) -> None:
    stream_BT = random_tokens(2, LENGTH + 1)
    for options in combinations(positions, memory_kind)[::3]:
        model = tiny_model(**options, memory_length=4)
        for changed in (2, 6, 9):
            other_BT = stream_BT.clone()
            other_BT[:, changed] = (other_BT[:, changed] + 1) % 37
            before, after = (
                stream_nll(model, tokens, [4, 4, 4])[0] for tokens in (stream_BT, other_BT)
            )
            assert torch.equal(before[:, : changed - 1], after[:, : changed - 1]), options
            assert (before[:, changed:] != after[:, changed:]).any(), options


@EVERY_POSITION
@EVERY_MEMORY
@pytest.mark.parametrize("start", [3, 5, 8])
def test_an_isolated_document_is_bitwise_blind_to_the_one_before(
    positions: str, memory_kind: str, start: int
) -> None:
    """With a memory of 4 and a rate of 2 or 3 some compressed row spans every boundary."""
    length = 20
    stream_BT, starts_BT = (
        random_tokens(2, length + 1),
        torch.zeros(2, length + 1, dtype=torch.bool),
    )
    starts_BT[:, start] = True
    other_BT = stream_BT.clone()
    other_BT[:, :start] = (other_BT[:, :start] + 7) % 37
    for options in combinations(positions, memory_kind)[::7]:
        losses = {}
        for isolated in (True, False):
            model = tiny_model(**options, memory_length=4, isolate_documents=isolated)
            losses[isolated] = [
                stream_nll(model, tokens, [4] * 5, starts_BT)[0] for tokens in (stream_BT, other_BT)
            ]
        assert torch.equal(losses[True][0][:, start:], losses[True][1][:, start:]), options
        assert not torch.equal(losses[True][0][:, : start - 1], losses[True][1][:, : start - 1])
        assert not torch.equal(losses[False][0][:, start:], losses[False][1][:, start:]), options


@EVERY_POSITION
@EVERY_MEMORY
def test_the_fast_attention_changes_neither_losses_nor_gradients(
    positions: str, memory_kind: str
) -> None:
    stream_BT, starts_BT = random_tokens(2, LENGTH + 1), random_starts(2, LENGTH + 1)
    for options in combinations(positions, memory_kind)[::5]:
        results = []
        for kernel in ("auto", "plain"):
            like = tiny_model(
                **options,
                memory_length=4,
                dropout=0.1,
                attention_dropout=0.2,
                isolate_documents=True,
                z_loss=1e-2,
            )
            model = TransformerXL(like.config, attention_kernel=kernel).double()
            model.load_state_dict(like.state_dict())
            nll_BT, _ = stream_nll(
                model, stream_BT, [4, 4, 4], starts_BT, DropoutStream(1, 2, [0, 1])
            )
            nll_BT.mean().backward()
            results.append(
                (nll_BT.detach(), {name: each.grad for name, each in model.named_parameters()})
            )
        torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11, msg=str(options))


@EVERY_POSITION
def test_window_of_same_length_makes_segment_length_irrelevant(positions: str) -> None:
    stream_BT = random_tokens(2, LENGTH + 1)
    for options in combinations(positions, "rows")[::5]:
        model = tiny_model(**options, same_length=True, memory_length=3)
        whole, _ = stream_nll(model, stream_BT, [LENGTH])
        torch.testing.assert_close(
            stream_nll(model, stream_BT, [1, 2, 4, 5])[0], whole, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("memory_kind", [name for name in MEMORIES if name != "tokens"])
def test_what_is_remembered_does_not_depend_on_how_the_stream_is_cut(memory_kind: str) -> None:
    """One layer: its inputs are the embeddings, the same for every cut."""
    options = {**SMALL, **MEMORIES[memory_kind], "num_layers": 1, "memory_length": 4}
    options["layer_kinds"] = options.get("layer_kinds", ())[:1]
    model = tiny_model(**options)
    stream_BT, starts_BT = random_tokens(2, 25), random_starts(2, 25)
    memories = [
        stream_nll(model, stream_BT, lengths, starts_BT)[1]
        for lengths in ([24], [4] * 6, [5, 7, 1, 11], [1] * 24)
    ]
    for memory in memories:
        assert memory is not None
        recent = num_rows(memory)
        waiting = 20 % model.config.compression_rate if model.config.compressed_length else 0
        assert recent == 4 + waiting
        for part, first in zip(memory, memories[0] or (), strict=True):
            torch.testing.assert_close(part, first, rtol=0, atol=1e-13)
