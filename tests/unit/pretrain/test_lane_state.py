"""What lanes carry: every kind of part is reset, kept, moved, saved and shared out the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pretrain.config.lane_parts import LanePart, LaneParts
from pretrain.model.lane_state import LaneState, Memory, lanes_of, selected_lanes
from tests.helpers.models import TINY

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
