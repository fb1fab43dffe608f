"""The fast CPU attention against attention written out distance by distance."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pretrain.kernels.cpu.attention import Tiling, relative_attention
from tests.helpers.exact_attention import exact_attention

SMALL_TILES = Tiling(rows=3, scores=70)  # several blocks, lane and head groups for a few rows


@dataclass(frozen=True)
class Case:
    """Sizes and options of one comparison."""

    lanes: int = 3
    queries: int = 7
    memory: int = 5
    heads: int = 4
    key_heads: int = 4
    width: int = 4
    max_distance: int | None = None
    documents: bool = False
    keep_probability: float = 1.0
    clamp: int = 0
    positions: Literal["encodings", "biases", "none"] = "encodings"
    sinks: bool = False
    tiling: Tiling = SMALL_TILES

    @property
    def keys(self) -> int:
        return self.queries + self.memory


CASES = {
    "plain": Case(),
    "one_tile": Case(tiling=Tiling()),
    "tiles_of_two_heads": Case(tiling=Tiling(rows=4, scores=4 * 12 * 6)),
    "rows_of_one": Case(tiling=Tiling(rows=1, scores=1)),
    "no_memory": Case(memory=0),
    "one_query": Case(queries=1, memory=6),
    "one_query_and_no_memory": Case(queries=1, memory=0),
    "memory_longer_than_segment": Case(queries=4, memory=17),
    "window": Case(max_distance=5),
    "window_shorter_than_a_block": Case(max_distance=1),
    "window_longer_than_all": Case(max_distance=50),
    "clamp": Case(clamp=4),
    "documents": Case(documents=True),
    "documents_in_one_tile": Case(documents=True, tiling=Tiling()),
    "window_and_documents": Case(max_distance=4, documents=True),
    "dropout": Case(keep_probability=0.75),
    "grouped_queries": Case(key_heads=2),
    "one_key_head": Case(key_heads=1, tiling=Tiling()),
    "distance_biases": Case(positions="biases"),
    "distance_biases_in_one_tile": Case(positions="biases", key_heads=2, tiling=Tiling()),
    "distance_biases_and_everything": Case(
        positions="biases", key_heads=2, max_distance=6, documents=True, keep_probability=0.5
    ),
    "contents_only": Case(positions="none"),
    "contents_only_and_everything": Case(
        positions="none", key_heads=1, max_distance=6, documents=True, keep_probability=0.5
    ),
    "sinks": Case(sinks=True),
    "sinks_of_contents": Case(sinks=True, positions="none", key_heads=2, documents=True),
    "everything": Case(
        key_heads=2, max_distance=6, documents=True, keep_probability=0.5, clamp=5, sinks=True
    ),
}


def inputs_of(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Query, what the positions need, memory's and segment's keys and values."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return drawn.to(dtype).requires_grad_()

    heads = (case.heads, case.width)
    key_heads = (2, case.key_heads, case.width)
    positions = {
        "encodings": [(case.keys, *heads), heads, heads],
        "biases": [(case.keys, case.heads)],
        "none": [],
    }
    inputs = [
        values(case.lanes, case.queries, *heads),
        *(values(*shape) for shape in positions[case.positions]),
        *([values(case.heads)] if case.sinks else []),
        values(case.lanes, case.memory, *key_heads),
        values(case.lanes, case.queries, *key_heads),
    ]
    if case.clamp:
        distances = torch.arange(case.keys - 1, -1, -1).clamp(max=case.clamp)
        inputs[1] = inputs[1].detach().flip(0)[distances].requires_grad_()
    return inputs


def options_of(case: Case) -> dict:
    """The keyword arguments of `relative_attention`."""
    generator = torch.Generator().manual_seed(2)
    options: dict = {"max_distance": case.max_distance}
    if case.documents:
        starts = torch.rand(case.lanes, case.keys, generator=generator) < 0.25
        starts[0] = False  # one lane is a single document
        options["documents_BC"] = starts.cumsum(1, dtype=torch.int32) - 2
    if case.keep_probability < 1.0:
        # As the dropout stream lays it out: lanes outermost.
        shape = (case.lanes, case.heads, case.queries, case.keys)
        kept_BNLC = torch.rand(shape, generator=generator) < case.keep_probability
        options["keep_NBLC"] = kept_BNLC.movedim(0, 1)
        options["keep_probability"] = case.keep_probability
    return options


def distance_terms(case: Case, inputs: list[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return encodings and their two biases, None if absent, then all options."""
    encodings = inputs[1:4] if case.positions == "encodings" else [None] * 3
    terms = {"distance_bias_CN": inputs[1] if case.positions == "biases" else None}
    return encodings, {**terms, "sinks_N": inputs[-3] if case.sinks else None, **options_of(case)}


def fast(case: Case, inputs: list[Tensor]) -> Tensor:
    encodings, options = distance_terms(case, inputs)
    return relative_attention(inputs[0], inputs[-2:], *encodings, **options, tiling=case.tiling)


def exact(case: Case, inputs: list[Tensor]) -> Tensor:
    encodings, options = distance_terms(case, inputs)
    if "keep_NBLC" in options:
        options["keep_BNLC"] = options.pop("keep_NBLC").transpose(0, 1)
        options["dropout"] = 1.0 - options.pop("keep_probability")
    key, value = torch.cat(inputs[-2:], 1).unbind(2)
    return exact_attention(inputs[0], key, value, *encodings, **options)


def with_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(output.shape, dtype=torch.float64, generator=generator).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, over the expected tensor's largest entry if above 1."""
    return max(
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0)).item()
        for a, b in zip(found, expected, strict=True)
        if a.numel()
    )


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_formula(name: str) -> None:
    case = CASES[name]
    for dtype, most in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        inputs = inputs_of(case, dtype)
        expected = with_gradients(exact(case, inputs), inputs)
        assert largest_error(with_gradients(fast(case, inputs), inputs), expected) < most


def test_usual_tiles_agree_with_the_formula_at_a_usual_size() -> None:
    sizes = {"lanes": 2, "queries": 200, "memory": 130, "heads": 2, "key_heads": 2, "width": 16}
    case = Case(**sizes, documents=True, tiling=Tiling())
    inputs = inputs_of(case, torch.float32)
    precise = [values.detach().double().requires_grad_() for values in inputs]
    expected = with_gradients(exact(case, precise), precise)
    assert largest_error(with_gradients(fast(case, inputs), inputs), expected) < 1e-5


def test_bfloat16_stays_within_its_rounding_of_float64() -> None:
    case = CASES["everything"]
    inputs = inputs_of(case, torch.bfloat16)
    precise = [values.detach().double().requires_grad_() for values in inputs]
    found = with_gradients(fast(case, inputs), inputs)
    assert {values.dtype for values in found} == {torch.bfloat16}
    assert largest_error(found, with_gradients(exact(case, precise), precise)) < 0.03


def test_two_threads_repeat_each_other_bitwise() -> None:
    sizes = {"lanes": 3, "queries": 150, "memory": 90, "heads": 2, "key_heads": 2, "width": 16}
    case = Case(**sizes, tiling=Tiling(rows=64, scores=1 << 15))
    inputs = inputs_of(case, torch.float32)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, *others = [with_gradients(fast(case, inputs), inputs) for _ in range(4)]
    finally:
        torch.set_num_threads(num_threads)
    for other in others:
        assert all(map(torch.equal, other, first))


def test_output_without_gradient_is_bitwise_the_same_and_inputs_are_left_as_they_were() -> None:
    case = CASES["everything"]
    inputs = inputs_of(case, torch.float32)
    before = [values.detach().clone() for values in inputs]
    expected = with_gradients(fast(case, inputs), inputs)[0]
    with torch.no_grad():
        assert torch.equal(fast(case, inputs), expected)
    assert all(map(torch.equal, inputs, before))


def test_keys_outside_every_window_are_not_read() -> None:
    case = Case(queries=6, memory=10, max_distance=4)
    inputs = inputs_of(case, torch.float32)
    expected = fast(case, inputs)
    with torch.no_grad():
        inputs[4][:, :7] = float("nan")  # the first query sees key 10 - 3 and later ones
    assert torch.equal(fast(case, inputs), expected)


def test_keys_of_documents_that_ended_before_the_segment_are_not_read() -> None:
    query, *positions, memory, own = inputs_of(Case(lanes=2, queries=6, memory=10), torch.float32)
    documents = torch.zeros(2, 16, dtype=torch.int32)
    documents[0, 9:], documents[1, 3:] = 1, 4
    expected = relative_attention(query, [memory, own], *positions, documents_BC=documents)
    with torch.no_grad():
        memory[0, :9], memory[1, :3] = float("nan"), float("nan")
    found = relative_attention(query, [memory, own], *positions, documents_BC=documents)
    assert torch.equal(found, expected)
