"""Invariants for any weights: of recurrence, lanes, time and documents.

They hold for every member of the family, and for models in which every two choices meet.
"""

import math
from itertools import combinations, product
from typing import Any, get_args

import pytest
import torch

from pretrain.config.model import FeedForwardKind, NormKind, NormPosition, Positions
from pretrain.model.dropout import DropoutStream
from pretrain.model.memory import num_rows
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import (
    CUT_ANYWHERE,
    VARIANTS,
    other_tokens,
    random_starts,
    random_tokens,
    stream_nll,
    tiny_model,
)

LENGTH = 16
SMALL = {"d_model": 8, "num_heads": 4, "d_head": 2, "d_inner": 10}
MEMORIES: dict[str, dict[str, Any]] = {
    "rows": {},
    "deltanet": {"layer_kinds": ("deltanet", "attention")},
    "tokens": {"layer_kinds": ("attention", "deltanet"), "memory_tokens": 2},
    **{f"1/{rate}": {"compressed_length": 3, "compression_rate": rate} for rate in (2, 3)},
}
CHOICES = {
    "memory": tuple(MEMORIES),
    "positions": get_args(Positions),
    "feed_forward": get_args(FeedForwardKind),
    "norm": get_args(NormKind),
    "norm_position": get_args(NormPosition),
    "num_key_heads": (2, 4),
    "query_key_norm": (False, True),
}


def pairwise() -> dict[str, dict[str, Any]]:
    """Return few models in which every two choices meet, found greedily."""
    models = list(product(*CHOICES.values()))
    pairs = {model: set(combinations(enumerate(model), 2)) for model in models}
    missing, taken = set().union(*pairs.values()), {}
    while missing:
        best = max(models, key=lambda model: len(pairs[model] & missing))
        missing -= pairs[best]
        options = dict(zip(CHOICES, best, strict=True))
        name = " ".join(map(str, best))
        taken[name] = {**SMALL, **MEMORIES[str(options.pop("memory"))], **options}
    return taken


PAIRWISE = pairwise()
MODELS = VARIANTS | PAIRWISE
OTHERS_CUT = [name for name, options in PAIRWISE.items() if "memory_tokens" not in options]
WITH_A_WINDOW = [
    name for name in (*CUT_ANYWHERE, *OTHERS_CUT) if "compressed_length" not in MODELS[name]
]
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
CUT_MODELS = pytest.mark.parametrize("name", [*CUT_ANYWHERE, *OTHERS_CUT])


def model_of(name: str, **options: Any) -> TransformerXL:
    return tiny_model(**{**MODELS[name], **options})


def starts_at(*starts: int, length: int = LENGTH) -> torch.Tensor:
    """A document of each lane starts there, in a stream of that many tokens and their targets."""
    starts_BT = torch.zeros(len(starts), length + 1, dtype=torch.bool)
    starts_BT[range(len(starts)), starts] = True
    return starts_BT


def assert_segment_length_does_not_matter(model: TransformerXL) -> None:
    stream_BT, starts_BT = random_tokens(2, LENGTH + 1), random_starts(2, LENGTH + 1)
    whole, _ = stream_nll(model, stream_BT, [LENGTH], starts_BT)
    for lengths in ([8] * 2, [1, 1, 2, 5, 7]):
        cut, _ = stream_nll(model, stream_BT, lengths, starts_BT)
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


@CUT_MODELS
def test_with_memory_as_long_as_the_stream_segment_length_does_not_matter(name: str) -> None:
    assert_segment_length_does_not_matter(model_of(name, memory_length=LENGTH))


@pytest.mark.parametrize("name", WITH_A_WINDOW)
def test_with_same_length_segment_length_does_not_matter_for_any_memory(name: str) -> None:
    for memory_length in (1, 8):
        options = {"same_length": True, "memory_length": memory_length}
        assert_segment_length_does_not_matter(model_of(name, **options))


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
        recent = num_rows(memory)
        waiting = 20 % model.config.compression_rate if model.config.compressed_length else 0
        assert recent == 4 + waiting
        for part, first in zip(memory, memories[0] or (), strict=True):
            torch.testing.assert_close(part, first, rtol=0, atol=1e-13)


@EVERY_MODEL
def test_a_lane_does_not_depend_on_its_place_or_the_text_of_others(name: str) -> None:
    model = model_of(name, memory_length=4)
    stream_BT, starts_BT = random_tokens(4, LENGTH + 1), random_starts(4, LENGTH + 1)
    order, others = [0, 2, 1, 3], [0, 3]
    before, memory = stream_nll(model, stream_BT, [8, 8], starts_BT)
    after, after_memory = stream_nll(model, stream_BT[order], [8, 8], starts_BT[order])
    for part, other in zip((before, *memory), (after, *after_memory), strict=True):
        # In place: CPUs may round a row of a matrix product by its place in the batch. Of an
        # adaptive softmax also by how many rows there are.
        if "cutoffs" not in MODELS[name]:
            assert torch.equal(other[others], part[others])
        torch.testing.assert_close(other, part[order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_in_a_lanes_memory_stays_in_that_lane(variant: str) -> None:
    model = tiny_model(**VARIANTS[variant])
    stream_BT, starts_BT = random_tokens(4, 17), torch.zeros(4, 17, dtype=torch.bool)
    # With gradients every lane's loss contains the error of what all lanes compress.
    with torch.no_grad():
        _, memory = stream_nll(model, stream_BT[:, :9], [8], starts_BT[:, :9])
        floats = [part for part in memory if part.is_floating_point()]
        for part in floats:
            part[2] = math.nan
        nll_BT, after = stream_nll(model, stream_BT[:, 8:], [8], starts_BT[:, 8:], memory=memory)
    others = [0, 1, 3]
    assert nll_BT[others].isfinite().all()
    assert all(part[others].isfinite().all() for part in after if part.is_floating_point())
    assert bool(nll_BT[2].isnan().any()) == any(part[0].numel() for part in floats)


@EVERY_MODEL
def test_no_token_sees_the_future_bitwise(name: str) -> None:
    """One token of each lane is another: a lane depends on no other, see above."""
    model, before_BT = model_of(name, memory_length=4), random_tokens(3, 17)
    lanes, changed = range(3), (3, 8, 13)
    after_BT = before_BT.clone()
    after_BT[lanes, changed] = other_tokens(after_BT[lanes, changed])
    before, after = (stream_nll(model, each, [4] * 4)[0] for each in (before_BT, after_BT))
    for lane, t in zip(lanes, changed, strict=True):
        # Column t predicts token t + 1: the changed token is the target of column t - 1.
        assert torch.equal(before[lane, : t - 1], after[lane, : t - 1])
        assert (before[lane, t:] != after[lane, t:]).any()


@EVERY_MODEL
def test_an_isolated_document_is_bitwise_blind_to_the_one_before(name: str) -> None:
    """With a memory of 4 and a rate of 2 or 3 some compressed row spans every boundary."""
    starts, stream_BT = (3, 5, 8), random_tokens(3, LENGTH + 1)
    other_BT = stream_BT.clone()
    for lane, start in enumerate(starts):
        other_BT[lane, :start] = other_tokens(other_BT[lane, :start])
    for isolates in (True, False):
        model = model_of(name, isolate_documents=isolates, memory_length=4)
        losses, others = (
            stream_nll(model, each, [4] * 4, starts_at(*starts))[0]
            for each in (stream_BT, other_BT)
        )
        for lane, start in enumerate(starts):
            assert (losses[lane, : start - 1] != others[lane, : start - 1]).any()
            assert torch.equal(losses[lane, start:], others[lane, start:]) == isolates


@pytest.mark.parametrize("variant", CUT_ANYWHERE)
def test_an_isolated_document_scores_as_if_it_stood_alone(variant: str) -> None:
    """Each lane's, by its own boundary."""
    model = model_of(variant, isolate_documents=True, memory_length=LENGTH)
    starts, stream_BT = (5, 8, 11), random_tokens(3, LENGTH + 1)
    nll_BT, _ = stream_nll(model, stream_BT, [8, 8], starts_at(*starts))
    for lane, start in enumerate(starts):
        alone_BT, _ = stream_nll(model, stream_BT[lane, None, start:], [LENGTH - start])
        torch.testing.assert_close(nll_BT[lane, None, start:], alone_BT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PAIRWISE)
def test_the_fast_attention_changes_neither_losses_nor_gradients(name: str) -> None:
    stream_BT, starts_BT = random_tokens(2, 13), random_starts(2, 13)
    more = {"dropout": 0.1, "attention_dropout": 0.2, "isolate_documents": True, "z_loss": 1e-2}
    like, results = model_of(name, memory_length=4, **more), []
    for kernel in ("auto", "plain"):
        model = TransformerXL(like.config, attention_kernel=kernel).double()
        model.load_state_dict(like.state_dict())
        dropout = DropoutStream(1, 2, [0, 1])
        nll_BL, _ = stream_nll(model, stream_BT, [4, 4, 4], starts_BT, dropout)
        nll_BL.mean().backward()
        gradients = {each: parameter.grad for each, parameter in model.named_parameters()}
        results.append((nll_BL.detach(), gradients))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)
