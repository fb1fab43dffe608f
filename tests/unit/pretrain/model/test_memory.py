"""What lanes carry from segment to segment, and gradients through it (gradient_segments)."""

from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import ConfigError
from pretrain.config.run import DataConfig, EngineConfig, RunConfig
from pretrain.costs.device_memory import Footprint, checkpoint_bytes
from pretrain.model.cached import new_stream
from pretrain.model.dropout import DropoutStream, Site
from pretrain.model.memory import Memory, MemoryLayout
from pretrain.model.transformer_xl import TransformerXL
from pretrain.model.visibility import Visibility
from tests.helpers.models import (
    CUT_ANYWHERE,
    TINY,
    VARIANTS,
    random_starts,
    random_tokens,
    stream_nll,
    tiny_model,
)

LANES = 4
LIKE = torch.zeros(1, dtype=torch.bfloat16)


def memory_layout(*, isolate_documents: bool = True) -> MemoryLayout:
    """A layer with a state in float32 and the last inputs of its convolution, one with rows."""
    kinds = ("deltanet", "attention")
    return MemoryLayout(replace(TINY, layer_kinds=kinds, isolate_documents=isolate_documents))


def memory_of(state: MemoryLayout) -> Memory:
    """A memory whose every number is its own lane's."""
    empty = state.empty(LANES, LIKE)
    shapes = ((LANES, 8, *part.shape[2:]) if 0 in part.shape else part.shape for part in empty)
    torch.manual_seed(0)
    *floats, documents_BM = [torch.randn(shape) for shape in shapes]
    return state.moved((*floats, documents_BM.sign() - 1), torch.device("cpu"), torch.float32)


def same(left: Memory, right: Memory) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


def test_a_forgotten_segment_resets_states_of_lanes_in_which_a_document_started() -> None:
    starts_BL = torch.tensor([[False, True, True], [False] * 3, [True, False, False], [False] * 3])
    for isolates in (True, False):
        state = memory_layout(isolate_documents=isolates)
        memory = memory_of(state)
        after = state.after_forgotten_segment(memory, starts_BL)
        reset = [0, 2] if isolates else []
        for name in ("layers.0.state", "layers.0.tail"):
            before, found = (state.named(each)[name].clone() for each in (memory, after))
            before[reset] = 0.0
            assert torch.equal(found, before)
        before, found = state.named(memory), state.named(after)
        assert torch.equal(found["layers.1.hidden"], before["layers.1.hidden"])
        started_B1 = torch.tensor([[2], [0], [1], [0]])
        assert torch.equal(found["documents"], before["documents"] - started_B1)


def test_a_segment_without_memory_reads_no_rows_and_states_of_zeros_in_their_own_types() -> None:
    state = memory_layout()
    assert same(state.joined(state.taken_apart(memory_of(state))), memory_of(state))
    state.parts = replace(state.parts, is_forgotten=True)
    found = state.joined(state.usable(memory_of(state), LANES, LIKE))
    assert [(*part.shape, part.dtype) for part in found] == [
        (LANES, 2, 8, 16, torch.float32),
        (LANES, 3, 64, torch.bfloat16),
        (LANES, 0, 16, torch.bfloat16),
        (LANES, 0, torch.int32),
    ]
    assert all(not part.any() for part in found)


def test_tensors_of_other_names_or_shapes_are_no_memory() -> None:
    state = memory_layout()
    named = state.named(memory_of(state))
    assert state.of_named(named, LANES)
    with pytest.raises(ConfigError, match=r"the memory is .*, the model has"):
        state.of_named(named, LANES + 1)
    with pytest.raises(ConfigError, match=r"layers.2.hidden .* the model has nothing"):
        state.of_named({**named, "layers.2.hidden": named["layers.1.hidden"]}, LANES)
    for name, part in named.items():
        other = part.float() if name == "documents" else part.int()
        for changed in (part[..., None], other):
            with pytest.raises(ConfigError, match=rf"{name} of the memory is {changed.dtype}"):
                state.of_named({**named, name: changed}, LANES)
        del (fewer := dict(named))[name]
        with pytest.raises(ConfigError, match=rf"{name} of the memory is missing"):
            state.of_named(fewer, LANES)


WRITTEN, LENGTH = 3, 5
ALONE: dict[str, Any] = {"memory_tokens": WRITTEN, "memory_length": 0}


def read_between_ends(plain: TransformerXL, tokens_BL: Tensor) -> Any:
    """What the plain model returns for as many tokens as it gets vectors: those of the ends do
    not matter."""
    ends_BX = tokens_BL[:, :WRITTEN]
    padded_BX = torch.cat([ends_BX, tokens_BL, ends_BX], dim=1)
    with plain.embedding.register_forward_pre_hook(
        lambda _module, inputs: (inputs[0][:, WRITTEN:-WRITTEN],)
    ):
        return plain.hidden_states(padded_BX)


@pytest.mark.parametrize("options", [{}, {"norm_position": "pre"}, {"positions": "alibi"}], ids=str)
def test_segments_are_those_of_a_plain_model_whose_ends_are_what_was_written(options):
    """The plain model reads longer segments, whose ends are given to it as embedded tokens."""
    model = tiny_model(**ALONE, **options)
    plain = TransformerXL(replace(model.config, memory_tokens=0)).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    initial_XD = model.memory_tokens.initial * TINY.d_model**0.5
    ends_BXD = initial_XD.expand(2, -1, -1)
    plain.embedding.register_forward_hook(
        lambda _module, _inputs, hidden_BLD: torch.cat([ends_BXD, hidden_BLD, ends_BXD], dim=1)
    )
    tokens_BT, memory = random_tokens(2, 4 * LENGTH), None
    for tokens_BL in tokens_BT.split(LENGTH, dim=1):
        hidden_BLD, memory, _ = model.hidden_states(tokens_BL, memory)
        expected_BXD, _, _ = read_between_ends(plain, tokens_BL)
        ends_BXD = expected_BXD[:, -WRITTEN:]
        if model.memory_tokens.norm is not None:
            ends_BXD = model.memory_tokens.norm(ends_BXD)
        torch.testing.assert_close(hidden_BLD, expected_BXD[:, WRITTEN:-WRITTEN])
        written_BXD = MemoryLayout(model.config).named(memory)["memory_tokens"]
        torch.testing.assert_close(written_BXD, ends_BXD.detach())


def test_the_memory_of_hidden_states_holds_the_segments_own_tokens() -> None:
    model = tiny_model(memory_tokens=WRITTEN, memory_length=7)
    tokens_BT, starts_BT = random_tokens(2, 10), random_starts(2, 10)
    _, memory, _ = model.hidden_states(tokens_BT[:, :5], None, starts_BT[:, :5])
    _, memory, _ = model.hidden_states(tokens_BT[:, 5:], memory, starts_BT[:, 5:])
    named = MemoryLayout(model.config).named(memory)
    assert torch.equal(named["layers.0.hidden"], model.embedding(tokens_BT[:, 3:]))
    counted_BT = starts_BT.cumsum(1) - starts_BT.sum(1, keepdim=True)
    assert torch.equal(named["documents"].long(), counted_BT[:, 3:])


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


LAYERS = 6
SEGMENTS = [5, 9, 1, 7, 9]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "isolated_pre_norm": {"isolate_documents": True, "norm_position": "pre"},
    "rope": {"positions": "rope", "norm_position": "pre"},
    "alibi": {"positions": "alibi"},
    "t5": {"positions": "t5", "isolate_documents": True},
    "clamp": {"clamp_length": 6, "untie_biases": True},
}


class Masked(Visibility):
    """What a layer sees of the longest memory: no more rows than `own`, and with a window keys."""

    own: int
    is_window: bool

    @cached_property
    def mask(self) -> Tensor:
        first_query, keys = self.num_keys - self.num_queries, torch.arange(self.num_keys)
        distances_LC = torch.arange(first_query, self.num_keys)[:, None] - keys
        hidden = (distances_LC < 0) | (keys < first_query - self.own)
        if self.is_window:
            hidden = hidden | (distances_LC >= self.own)
        if self.documents_BC is not None:
            queries_BL1 = self.documents_BC[:, first_query:, None]
            hidden = hidden | (queries_BL1 != self.documents_BC[:, None])
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill(hidden, float("-inf"))


def masked(model: TransformerXL, lengths: tuple[int, ...], is_window: bool) -> TransformerXL:
    """The model, with plain operations and a mask for every layer's own length of memory."""

    def hook_of(own: int) -> Any:
        def hook(module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            seen = options["visibility"]
            changed = Masked(**{each.name: getattr(seen, each.name) for each in fields(seen)})
            object.__setattr__(changed, "own", own)
            object.__setattr__(changed, "is_window", is_window)
            return inputs, {**options, "visibility": changed}

        return hook

    for layer, own in zip(model.layers, lengths, strict=True):
        layer.register_forward_pre_hook(hook_of(own), with_kwargs=True)
        layer.attention._kernel = "plain"  # type: ignore[union-attr]
    return model


def losses_and_gradients(model: TransformerXL) -> tuple[Tensor, dict[str, Tensor], Any]:
    length = sum(SEGMENTS)
    stream_BT, starts_BT = random_tokens(3, length + 1), random_starts(3, length + 1)
    nll_BT, memory = stream_nll(model, stream_BT, SEGMENTS, starts_BT)
    nll_BT.sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return nll_BT.detach(), found, MemoryLayout(model.config).named(memory or ())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("same_length", [False, True])
def test_losses_gradients_and_memory_are_those_of_the_longest_memory_with_masks(case, same_length):
    pattern = (3, 20, 5) if same_length else (3, 20, 0)
    options = {"num_layers": LAYERS, **CASES[case]}
    lengths = pattern * (LAYERS // len(pattern))
    reference = masked(tiny_model(**options, memory_length=20), lengths, same_length)
    model = tiny_model(**options, memory_length=pattern, same_length=same_length)
    expected, expected_gradients, expected_memory = losses_and_gradients(reference)
    found, gradients, memory = losses_and_gradients(model)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-7, atol=1e-9)
    for layer, length in enumerate(lengths):
        name = f"layers.{layer}.hidden"
        rows_BMD, longest_BMD = memory[name], expected_memory[name]
        assert rows_BMD.shape[1] == length
        torch.testing.assert_close(rows_BMD, longest_BMD[:, 20 - length :], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(None, (3, 8) * 2), (0, (0, 0) * 2), (2, (2, 2) * 2), (5, (3, 5) * 2), (64, (3, 64) * 2)],
)
def test_another_length_in_evaluation_is_that_of_the_longest_layers(longest, lengths) -> None:
    model = replace(TINY, num_layers=4, memory_length=(3, 8))
    assert model.memory_lengths(longest) == lengths
    rows = {part.name: part.length for part in MemoryLayout(model, longest).parts}
    expected = {f"layers.{layer}.hidden": length for layer, length in enumerate(lengths)}
    assert rows == {**expected, "documents": max(lengths)}
    if longest is not None:
        assert model.with_memory(longest).memory_lengths() == lengths


@pytest.mark.parametrize(("width", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_bytes_of_memory_and_checkpoint_are_those_of_the_tensors(width, dtype):
    data, engine = DataConfig(lanes=6, segment_length=8), EngineConfig(precision=width)
    for options in ({"memory_length": (3, 8)}, {"layer_kinds": ("deltanet", "attention")}):
        run = RunConfig(model=replace(TINY, **options), data=data, engine=engine)
        module = TransformerXL(run.model).to(dtype)
        _, memory = module(random_tokens(6, 8), random_tokens(6, 8, 1))
        counted = Footprint(run, 1).parts["recurrent memory"]
        assert counted == 2 * sum(part.nbytes for part in memory)
    run, uniform = (
        RunConfig(model=replace(TINY, memory_length=length), data=data, engine=engine)
        for length in ((3, 8), 8)
    )
    saved = checkpoint_bytes(uniform) - checkpoint_bytes(run)
    assert saved == 6 * (8 - 3) * TINY.d_model * dtype.itemsize


NUM_SEGMENTS, PART_LENGTH, FEW_LANES, BEFORE = 3, 4, 2, 8
TOTAL = NUM_SEGMENTS * PART_LENGTH
WITHOUT_Z_LOSS: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in options.items() if key != "z_loss"}
    for name, options in VARIANTS.items()
}
# Nothing of the loss goes through compressed rows, which are part of its value.
NOT_COMPRESSED: dict[str, dict[str, Any]] = {
    name: options for name, options in WITHOUT_Z_LOSS.items() if "compressed_length" not in options
}
DROPPING: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.1}
STREAM_BT = random_tokens(FEW_LANES, BEFORE + TOTAL + 1)
STARTS_BT = random_starts(FEW_LANES, BEFORE + TOTAL + 1)
Gradients = dict[str, Tensor]


def read(model, start, stop, memory, dropout=None, segments=1) -> tuple[Tensor, Memory]:
    """The NLL of these tokens of the stream, and the memory after them."""
    part, targets = slice(start, stop), slice(start + 1, stop + 1)
    tokens = (STREAM_BT[:, part], STREAM_BT[:, targets], memory, STARTS_BT[:, part])
    return model(*tokens, dropout, num_segments=segments)


def group_loss(model: TransformerXL, memory: Memory, dropout: Any = None) -> Tensor:
    """The mean loss of one step with gradient segments."""
    return read(model, BEFORE, BEFORE + TOTAL, memory, dropout, NUM_SEGMENTS)[0].mean()


def gradients(loss: Tensor, model: TransformerXL) -> Gradients:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: each for name, each in zip(names, found, strict=True) if each is not None}


def one_by_one(model: TransformerXL, memory: Memory, dropout: Any = None) -> tuple[Tensor, Memory]:
    """The NLL of the same segments, each with its own backward pass, and the last memory."""
    parts = []
    for number in range(NUM_SEGMENTS):
        start, masks = BEFORE + number * PART_LENGTH, dropout and dropout.of_segment(number)
        nll_BL, memory = read(model, start, start + PART_LENGTH, memory, masks)
        parts.append(nll_BL)
    return torch.cat(parts, dim=1), memory


@pytest.mark.parametrize(
    "variant", [name for name in NOT_COMPRESSED if name == "plain" or name not in CUT_ANYWHERE]
)
def test_the_gradient_is_that_of_the_groups_loss_by_finite_differences(variant: str) -> None:
    """The loss is the same function of the weights with or without the gradient through memory."""
    model = tiny_model(**NOT_COMPRESSED[variant])
    with torch.no_grad():
        _, memory = read(model, 0, BEFORE, None)
    generator = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(each.shape, generator=generator, dtype=each.dtype)
        for name, each in model.named_parameters()
    }

    def along(found: Gradients) -> float:
        return sum(float((each * direction[name]).sum()) for name, each in found.items())

    through = along(gradients(group_loss(model, memory), model))
    cut = along(gradients(one_by_one(model, memory)[0].mean(), model))
    step, losses = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for name, each in model.named_parameters():
                each.add_(direction[name], alpha=sign * step)
            losses.append(group_loss(model, memory).item())
    expected = (losses[0] - losses[1]) / (2 * step)
    assert through == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert cut != pytest.approx(expected, rel=1e-3, abs=1e-3), "the memory teaches nothing"


@pytest.mark.parametrize("variant", [name for name in NOT_COMPRESSED if name in CUT_ANYWHERE])
def test_it_is_the_gradient_of_one_long_segment_where_that_computes_the_same(variant):
    """With a memory as long as the step; with a window of keys, whatever else is remembered."""
    for memory_length, window in ((TOTAL, False), (5, True)):
        options = {**NOT_COMPRESSED[variant], "memory_length": memory_length}
        model = tiny_model(**options, same_length=window)
        whole, cut = (
            gradients(read(model, 0, TOTAL, None, None, number)[0].mean(), model)
            for number in (1, NUM_SEGMENTS)
        )
        torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_memory_is_bitwise_and_the_losses_are_those_of_the_segments_one_by_one(variant):
    model = tiny_model(**VARIANTS[variant], **DROPPING)
    masks = DropoutStream(seed=1, step=3, lanes=range(FEW_LANES))
    _, memory = read(model, 0, BEFORE, None, masks)
    expected_BT, expected = one_by_one(model, memory, masks)
    nll_BT, found = read(model, BEFORE, BEFORE + TOTAL, memory, masks, NUM_SEGMENTS)
    torch.testing.assert_close(nll_BT, expected_BT, rtol=0, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(part.requires_grad for part in found)


def test_each_segment_of_a_step_has_masks_of_its_own() -> None:
    stream = DropoutStream(seed=1, step=3, lanes=[0])
    others = [stream.of_segment(1), stream.of_segment(2), DropoutStream(1, 4, [0]).of_segment(1)]
    masks = [each.keep((1, 64), 0.5, Site.FINAL) for each in (stream, *others)]
    assert torch.equal(stream.of_segment(0).keep((1, 64), 0.5, Site.FINAL), masks[0])
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpointing_changes_no_bit_of_the_gradients_nor_kernels_more_than_rounding(variant):
    like = tiny_model(**VARIANTS[variant], **DROPPING)
    masks = DropoutStream(seed=1, step=3, lanes=range(FEW_LANES))

    def found(**options: Any) -> Gradients:
        model = TransformerXL(like.config, **options).double()
        model.load_state_dict(like.state_dict())
        _, memory = read(model, 0, BEFORE, None, masks)
        return gradients(group_loss(model, memory, masks), model)

    expected = found()
    for kind in ("selective", "full"):
        torch.testing.assert_close(found(activation_checkpointing=kind), expected, rtol=0, atol=0)
    torch.testing.assert_close(found(attention_kernel="plain"), expected, rtol=1e-9, atol=1e-11)


def test_a_learned_compression_learns_from_its_own_loss_alone_in_every_segment() -> None:
    model = tiny_model(**VARIANTS["compressive"])
    _, memory = read(model, 0, BEFORE, None)
    cut = gradients(one_by_one(model, memory)[0].mean(), model)
    through = gradients(group_loss(model, memory), model)
    convolutions = [name for name in through if name.startswith("compressions")]
    assert len(convolutions) == 2 * TINY.num_layers
    for name in convolutions:
        assert through[name].any()
        torch.testing.assert_close(through[name], cut[name], rtol=1e-10, atol=1e-14)


def test_no_gradient_reaches_the_memory_that_a_step_starts_with() -> None:
    model = tiny_model(memory_length=TINY.memory_length)
    _, memory = read(model, 0, BEFORE, None)
    memory = tuple(part.requires_grad_(part.is_floating_point()) for part in memory)
    group_loss(model, memory).backward()
    assert all(part.grad is None for part in memory)
