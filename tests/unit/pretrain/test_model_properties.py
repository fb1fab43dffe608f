"""Invariants for any weights: of recurrence, lanes, time and documents."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.models import (
    CUT_ANYWHERE,
    VARIANTS,
    other_tokens,
    random_starts,
    random_tokens,
    stream_nll,
    tiny_model,
)

LENGTH = 24
ALL_VARIANTS = pytest.mark.parametrize("variant", VARIANTS)


@pytest.mark.parametrize("variant", CUT_ANYWHERE)
def test_with_memory_as_long_as_the_stream_segment_length_does_not_matter(variant: str) -> None:
    model = tiny_model(**{**VARIANTS[variant], "memory_length": LENGTH})
    stream_BT, starts_BT = random_tokens(2, LENGTH + 1), random_starts(2, LENGTH + 1)
    whole, _ = stream_nll(model, stream_BT, [LENGTH], starts_BT)
    for length in (1, 2, 3, 4, 6, 8, 12):
        cut, _ = stream_nll(model, stream_BT, [length] * (LENGTH // length), starts_BT)
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", [name for name in CUT_ANYWHERE if "compressive" not in name])
@pytest.mark.parametrize("memory_length", [1, 8])
def test_with_same_length_segment_length_does_not_matter_for_any_memory(
    variant: str, memory_length: int
) -> None:
    model = tiny_model(**{**VARIANTS[variant], "same_length": True, "memory_length": memory_length})
    stream_BT, starts_BT = random_tokens(2, LENGTH + 1), random_starts(2, LENGTH + 1)
    whole, _ = stream_nll(model, stream_BT, [LENGTH], starts_BT)
    for length in (1, 2, 3, 4, 6, 8, 12):
        cut, _ = stream_nll(model, stream_BT, [length] * (LENGTH // length), starts_BT)
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


def test_without_same_length_a_short_memory_makes_segments_matter() -> None:
    model = tiny_model(memory_length=8)
    stream_BT = random_tokens(2, LENGTH + 1)
    assert (
        stream_nll(model, stream_BT, [LENGTH])[0] - stream_nll(model, stream_BT, [4] * 6)[0]
    ).abs().max() > 1e-3


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    variant=st.sampled_from(sorted(CUT_ANYWHERE)),
)
def test_unequal_segments_give_what_one_segment_gives(cuts: list[int], variant: str) -> None:
    # At least 2: the memory has to hold what is compressed into one row.
    model = tiny_model(**{**VARIANTS[variant], "memory_length": max(2, sum(cuts))})
    stream_BT, starts_BT = random_tokens(2, sum(cuts) + 1), random_starts(2, sum(cuts) + 1)
    whole, _ = stream_nll(model, stream_BT, [sum(cuts)], starts_BT)
    torch.testing.assert_close(
        stream_nll(model, stream_BT, cuts, starts_BT)[0], whole, rtol=0, atol=1e-12
    )


@ALL_VARIANTS
def test_permuted_lanes_give_permuted_losses(variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    stream_BT, starts_BT = random_tokens(4, LENGTH + 1), random_starts(4, LENGTH + 1)
    order = [2, 0, 3, 1]
    straight, memory = stream_nll(model, stream_BT, [8, 8, 8], starts_BT)
    permuted, permuted_memory = stream_nll(model, stream_BT[order], [8, 8, 8], starts_BT[order])
    # Not bitwise: CPUs may round a row of a matrix product by its place in the batch.
    torch.testing.assert_close(permuted, straight[order], rtol=0, atol=1e-12)
    assert memory is not None
    assert permuted_memory is not None
    for part, other in zip(memory, permuted_memory, strict=True):
        torch.testing.assert_close(other, part[order], rtol=0, atol=1e-12)


@ALL_VARIANTS
def test_nan_in_a_lanes_memory_stays_in_that_lane(variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    stream_BT, starts_BT = random_tokens(4, 17), torch.zeros(4, 17, dtype=torch.bool)
    # With gradients every lane's loss contains the error of what all lanes compress.
    with torch.no_grad():
        _, memory = stream_nll(model, stream_BT[:, :9], [8], starts_BT[:, :9])
        assert memory is not None
        floats = [part for part in memory if part.is_floating_point()]
        for part in floats:
            part[2] = math.nan
        nll_BT, after = stream_nll(model, stream_BT[:, 8:], [8], starts_BT[:, 8:], memory=memory)
    assert after is not None
    others = [0, 1, 3]
    assert nll_BT[others].isfinite().all()
    assert all(part[others].isfinite().all() for part in after if part.is_floating_point())
    assert bool(nll_BT[2].isnan().any()) == any(part[0].numel() for part in floats)


@ALL_VARIANTS
@pytest.mark.parametrize("changed", [3, 8, 13])
def test_no_token_sees_the_future_bitwise(variant: str, changed: int) -> None:
    model = tiny_model(**VARIANTS[variant])
    stream_BT = random_tokens(2, 17)
    other_BT = stream_BT.clone()
    other_BT[:, changed] = other_tokens(other_BT[:, changed])
    before, _ = stream_nll(model, stream_BT, [8, 8])
    after, _ = stream_nll(model, other_BT, [8, 8])
    # Column t predicts token t + 1: the changed token is the target of column `changed` - 1.
    assert torch.equal(before[:, : changed - 1], after[:, : changed - 1])
    assert (before[:, changed:] != after[:, changed:]).all()


@pytest.mark.parametrize("start", [5, 8, 11])
@ALL_VARIANTS
def test_an_isolated_document_is_bitwise_blind_to_the_one_before(variant: str, start: int) -> None:
    model = tiny_model(**{**VARIANTS[variant], "isolate_documents": True, "memory_length": 16})
    stream_BT, starts_BT = (
        random_tokens(2, LENGTH + 1),
        torch.zeros(2, LENGTH + 1, dtype=torch.bool),
    )
    starts_BT[:, start] = True
    other_BT = stream_BT.clone()
    other_BT[:, :start] = other_tokens(other_BT[:, :start])
    segments = [8, 8, 8]
    losses = [stream_nll(model, tokens, segments, starts_BT)[0] for tokens in (stream_BT, other_BT)]
    assert torch.equal(losses[0][:, start:], losses[1][:, start:])
    assert (losses[0][:, : start - 1] != losses[1][:, : start - 1]).any()
    open_model = tiny_model(
        **{**VARIANTS[variant], "isolate_documents": False, "memory_length": 16}
    )
    losses = [
        stream_nll(open_model, tokens, segments, starts_BT)[0] for tokens in (stream_BT, other_BT)
    ]
    assert (losses[0][:, start:] != losses[1][:, start:]).all()


@pytest.mark.parametrize("start", [5, 8, 11])
@pytest.mark.parametrize("variant", CUT_ANYWHERE)
def test_an_isolated_document_scores_as_if_it_stood_alone(variant: str, start: int) -> None:
    options = {**VARIANTS[variant], "isolate_documents": True, "memory_length": LENGTH}
    model = tiny_model(**options)
    stream_BT, starts_BT = (
        random_tokens(2, LENGTH + 1),
        torch.zeros(2, LENGTH + 1, dtype=torch.bool),
    )
    starts_BT[:, start] = True
    nll_BT, _ = stream_nll(model, stream_BT, [8, 8, 8], starts_BT)
    alone_BT, _ = stream_nll(model, stream_BT[:, start:], [LENGTH - start])
    torch.testing.assert_close(nll_BT[:, start:], alone_BT, rtol=0, atol=1e-12)


def test_isolation_follows_each_lanes_own_boundaries() -> None:
    model = tiny_model(isolate_documents=True, memory_length=LENGTH)
    stream_BT = random_tokens(3, LENGTH + 1)
    starts_BT = torch.zeros(3, LENGTH + 1, dtype=torch.bool)
    starts_BT[0, 4], starts_BT[1, [9, 10]] = True, True
    together, _ = stream_nll(model, stream_BT, [6] * 4, starts_BT)
    for lane in range(3):
        alone, _ = stream_nll(model, stream_BT[lane, None], [6] * 4, starts_BT[lane, None])
        torch.testing.assert_close(together[lane, None], alone, rtol=0, atol=1e-12)
