"""What lanes carry: every kind of part is reset, kept, moved, saved and shared out the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import ConfigError
from pretrain.config.lane_parts import LanePart, LaneParts
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.run import RunConfig
from pretrain.model.cached import new_stream
from pretrain.model.lane_state import LaneState, Memory, lanes_of, selected_lanes
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import TINY, random_starts, random_tokens, tiny_model

LANES = 4
LIKE = torch.zeros(1, dtype=torch.bfloat16)


def lane_state(*, isolate_documents: bool = True) -> LaneState:
    """A layer with a state in float32 and the last inputs of its convolution, one with rows."""
    state = LaneState(replace(TINY, isolate_documents=isolate_documents))
    matrix = LanePart(name="layers.0.matrix", kind="state", shape=(2, 3, 5), in_float32=True)
    tail = LanePart(name="layers.0.tail", kind="state", shape=(3, 7))
    state.parts = LaneParts(((matrix, tail), state.parts.layers[1]), state.parts.shared)
    return state


def memory_of(state: LaneState, rows: int = 8, dtype: torch.dtype = torch.float32) -> Memory:
    """A memory whose every number is its own lane's."""
    empty = state.empty(LANES, LIKE)
    shapes = ((LANES, rows, *part.shape[2:]) if 0 in part.shape else part.shape for part in empty)
    torch.manual_seed(0)
    drawn = [torch.randn(shape) for shape in shapes]
    *floats, documents_BM = drawn
    return state.moved((*floats, documents_BM.sign() - 1), torch.device("cpu"), dtype)


def same(left: Memory, right: Memory) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


def test_an_empty_memory_has_no_rows_and_zeros_as_states_in_their_own_types() -> None:
    memory = lane_state().empty(LANES, LIKE)
    assert [(*part.shape, part.dtype) for part in memory] == [
        (LANES, 2, 3, 5, torch.float32),
        (LANES, 3, 7, torch.bfloat16),
        (LANES, 0, 16, torch.bfloat16),
        (LANES, 0, torch.int32),
    ]
    assert all(not part.any() for part in memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_the_parts_are_those_of_the_full_tensors(dtype: torch.dtype) -> None:
    state = lane_state()
    memory = memory_of(state, rows=TINY.memory_length, dtype=dtype)
    assert state.parts.num_bytes(dtype.itemsize) * LANES == sum(part.nbytes for part in memory)


def test_a_forgotten_segment_resets_states_of_lanes_in_which_a_document_started() -> None:
    starts_BL = torch.tensor([[False, True, True], [False] * 3, [True, False, False], [False] * 3])
    for isolates in (True, False):
        state = lane_state(isolate_documents=isolates)
        memory = memory_of(state)
        after = state.after_forgotten_segment(memory, starts_BL)
        assert after is not None
        reset = [0, 2] if isolates else []
        for name in ("layers.0.matrix", "layers.0.tail"):
            before, found = (state.named(each)[name].clone() for each in (memory, after))
            before[reset] = 0.0
            assert torch.equal(found, before)
        names = "layers.1.hidden", "documents"
        (rows, documents), (rows_after, documents_after) = (
            [state.named(each)[name] for name in names] for each in (memory, after)
        )
        assert torch.equal(rows_after, rows)
        started_B1 = torch.tensor([[2], [0], [1], [0]])
        assert torch.equal(documents_after, documents - started_B1)


def test_a_segment_without_memory_reads_no_rows_and_states_of_zeros() -> None:
    state = lane_state()
    state.parts = replace(state.parts, is_forgotten=True)
    carried = state.usable(memory_of(state), LANES, LIKE)
    assert same(state.joined(carried), state.empty(LANES, LIKE))


def test_lanes_that_are_taken_apart_and_joined_are_the_same_memory() -> None:
    state = lane_state()
    memory = memory_of(state)
    halves = [selected_lanes(memory, lanes) for lanes in (slice(0, 1), slice(1, 4))]
    assert [lanes_of(half) for half in halves] == [1, 3]
    joined = tuple(torch.cat(parts) for parts in zip(*halves, strict=True))
    assert same(joined, memory)
    assert same(state.joined(state.taken_apart(memory)), memory)
    swapped = selected_lanes(memory, torch.tensor([3, 3, 0, 1]))
    assert same(selected_lanes(swapped, slice(2, 4)), selected_lanes(memory, slice(0, 2)))


def test_tensors_of_other_names_or_shapes_are_no_memory() -> None:
    state = lane_state()
    named = state.named(memory_of(state))
    assert state.of_named(named, LANES) is not None
    assert state.of_named(named, LANES + 1) is None
    assert state.of_named({**named, "layers.2.hidden": named["layers.1.hidden"]}, LANES) is None
    for name, part in named.items():
        assert state.of_named({each: named[each] for each in named if each != name}, LANES) is None
        assert state.of_named({**named, name: part[..., None]}, LANES) is None
        other = part.float() if name == "documents" else part.int()
        assert state.of_named({**named, name: other}, LANES) is None


WRITTEN, LENGTH = 3, 5
ALONE: dict[str, Any] = {"memory_tokens": WRITTEN, "memory_length": 0}


def embedded_between(ends: Callable[[], Tensor]) -> Callable[..., Tensor]:
    """A hook of an embedding: what it returns, between the ends."""

    def hook(_module: torch.nn.Module, _inputs: Any, hidden_BLD: Tensor) -> Tensor:
        return torch.cat([ends(), hidden_BLD, ends()], dim=1)

    return hook


def read_between_ends(plain: TransformerXL, tokens_BL: Tensor) -> Any:
    """What the plain model returns for as many tokens as it gets vectors: those of the ends do
    not matter."""
    ends_BX = tokens_BL[:, :WRITTEN]
    padded_BX = torch.cat([ends_BX, tokens_BL, ends_BX], dim=1)
    handle = plain.embedding.register_forward_pre_hook(
        lambda _module, inputs: (inputs[0][:, WRITTEN:-WRITTEN],)
    )
    try:
        return plain.hidden_states(padded_BX)
    finally:
        handle.remove()


@pytest.mark.parametrize("options", [{}, {"norm_position": "pre"}, {"positions": "alibi"}], ids=str)
def test_segments_are_those_of_a_plain_model_whose_ends_are_what_was_written(
    options: dict[str, Any],
) -> None:
    """The plain model reads longer segments, whose ends are given to it as embedded tokens."""
    model = tiny_model(**ALONE, **options)
    assert model.memory_tokens is not None
    plain = TransformerXL(replace(model.config, memory_tokens=0)).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    initial_XD = model.memory_tokens.initial * TINY.d_model**0.5
    ends_BXD = initial_XD.expand(2, -1, -1)
    plain.embedding.register_forward_hook(embedded_between(lambda: ends_BXD))
    tokens_BT, memory = random_tokens(2, 4 * LENGTH), None
    for tokens_BL in tokens_BT.split(LENGTH, dim=1):
        hidden_BLD, memory, _ = model.hidden_states(tokens_BL, memory)
        expected_BXD, _, _ = read_between_ends(plain, tokens_BL)
        ends_BXD = expected_BXD[:, -WRITTEN:]
        if model.memory_tokens.norm is not None:
            ends_BXD = model.memory_tokens.norm(ends_BXD)
        torch.testing.assert_close(hidden_BLD, expected_BXD[:, WRITTEN:-WRITTEN])
        written_BXD = LaneState(model.config).named(memory)["memory_tokens"]
        torch.testing.assert_close(written_BXD, ends_BXD.detach())


def test_the_memory_of_hidden_states_holds_the_segments_own_tokens() -> None:
    model = tiny_model(memory_tokens=WRITTEN, memory_length=7)
    tokens_BT, starts_BT = random_tokens(2, 10), random_starts(2, 10)
    _, memory, _ = model.hidden_states(tokens_BT[:, :5], None, starts_BT[:, :5])
    _, memory, _ = model.hidden_states(tokens_BT[:, 5:], memory, starts_BT[:, 5:])
    named = LaneState(model.config).named(memory)
    assert torch.equal(named["layers.0.hidden"], model.embedding(tokens_BT[:, 3:]))
    counted_BT = starts_BT.cumsum(1) - starts_BT.sum(1, keepdim=True)
    assert torch.equal(named["documents"].long(), counted_BT[:, 3:])


def test_only_later_segments_teach_what_is_written() -> None:
    model = tiny_model(**ALONE, norm_position="pre")
    tokens_BT = random_tokens(2, 2 * LENGTH + 1)
    first, both = slice(0, LENGTH), slice(0, 2 * LENGTH)
    for part, segments in ((first, 1), (both, 2)):
        model.zero_grad()
        nll_BL, _ = model(tokens_BT[:, part], tokens_BT[:, 1:][:, part], num_segments=segments)
        nll_BL.sum().backward()
        assert model.memory_tokens is not None
        assert model.memory_tokens.norm is not None
        assert (model.memory_tokens.norm.gain.grad is None) == (segments == 1)


def test_a_stream_reads_a_segment_as_one_however_its_tokens_come() -> None:
    model = tiny_model(memory_tokens=WRITTEN, memory_length=4).eval()
    tokens_BT, starts_BT = random_tokens(3, 4 * LENGTH), random_starts(3, 4 * LENGTH)
    whole = new_stream(model, 4, LENGTH)
    pairs = zip(tokens_BT.split(LENGTH, 1), starts_BT.split(LENGTH, 1), strict=True)
    expected_BTV = torch.cat([whole.logits_BLV(*pair) for pair in pairs], dim=1)
    for lengths in ([1] * 20, [2, 3, 5, 1, 4, 5], [5, 1, 1, 1, 1, 1, 5, 5]):
        stream, start, found = new_stream(model, 4, LENGTH), 0, []
        for length in lengths:
            part = slice(start, start + length)
            found.append(stream.logits_BLV(tokens_BT[:, part], starts_BT[:, part]))
            start += length
        torch.testing.assert_close(torch.cat(found, dim=1), expected_BTV)
    order = torch.tensor([2, 2, 0])
    stream = new_stream(model, 4, LENGTH)
    for start in range(8):
        stream.logits_BLV(tokens_BT[:, start, None], starts_BT[:, start, None])
    stream.select(order)
    tail = slice(8, 10)
    found_BLV = stream.logits_BLV(tokens_BT[order][:, tail], starts_BT[order][:, tail])
    torch.testing.assert_close(found_BLV, expected_BTV[order][:, tail])


def test_tokens_that_nothing_could_teach_or_see_are_refused() -> None:
    model = ModelConfig(memory_tokens=4)
    with pytest.raises(ConfigError, match=r"optim\.gradient_segments"):
        RunConfig(model=model)
    assert RunConfig(model=model, optim=OptimConfig(gradient_segments=2)).model == model
    with pytest.raises(ConfigError, match="memory_tokens"):
        ModelConfig(memory_tokens=4, same_length=True)
