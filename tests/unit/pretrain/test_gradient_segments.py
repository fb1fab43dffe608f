"""Gradients through the memory between the segments of a step (`optim.gradient_segments`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.model.dropout import DropoutStream, Site
from pretrain.model.lane_state import Memory
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import (
    CUT_ANYWHERE,
    TINY,
    VARIANTS,
    random_starts,
    random_tokens,
    tiny_model,
)

SEGMENTS, LENGTH, LANES, BEFORE = 3, 4, 2, 8
TOTAL = SEGMENTS * LENGTH
WITHOUT_Z_LOSS: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in options.items() if key != "z_loss"}
    for name, options in VARIANTS.items()
}
# Nothing of the loss goes through compressed rows, which are part of its value.
NOT_COMPRESSED: dict[str, dict[str, Any]] = {
    name: options for name, options in WITHOUT_Z_LOSS.items() if "compressed_length" not in options
}
DROPPING: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.1}
STREAM_BT = random_tokens(LANES, BEFORE + TOTAL + 1)
STARTS_BT = random_starts(LANES, BEFORE + TOTAL + 1)
Gradients = dict[str, Tensor]


def read(
    model: TransformerXL,
    start: int,
    stop: int,
    memory: Memory | None,
    dropout: DropoutStream | None = None,
    num_segments: int = 1,
) -> tuple[Tensor, Memory]:
    """The NLL of these tokens of the stream, and the memory after them."""
    return model(
        STREAM_BT[:, start:stop],
        STREAM_BT[:, start + 1 : stop + 1],
        memory,
        STARTS_BT[:, start:stop],
        dropout=dropout,
        num_segments=num_segments,
    )


def group_loss(
    model: TransformerXL, memory: Memory, dropout: DropoutStream | None = None
) -> Tensor:
    """The mean loss of one step with gradient segments."""
    nll_BT, _ = read(model, BEFORE, BEFORE + TOTAL, memory, dropout, SEGMENTS)
    return nll_BT.mean()


def gradients(loss: Tensor, model: TransformerXL) -> Gradients:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: each for name, each in zip(names, found, strict=True) if each is not None}


def one_by_one(
    model: TransformerXL, memory: Memory, dropout: DropoutStream | None = None
) -> tuple[Tensor, Memory]:
    """The NLL of the same segments, each with its own backward pass, and the last memory."""
    parts = []
    for number in range(SEGMENTS):
        start, masks = BEFORE + number * LENGTH, dropout and dropout.of_segment(number)
        nll_BL, memory = read(model, start, start + LENGTH, memory, masks)
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
def test_it_is_the_gradient_of_one_long_segment_where_that_computes_the_same(
    variant: str,
) -> None:
    """With a memory as long as the step; with a window of keys, whatever else is remembered."""
    for memory_length, window in ((TOTAL, False), (5, True)):
        options = {**NOT_COMPRESSED[variant], "memory_length": memory_length}
        model = tiny_model(**options, same_length=window)
        whole, cut = (
            gradients(read(model, 0, TOTAL, None, num_segments=number)[0].mean(), model)
            for number in (1, SEGMENTS)
        )
        torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_memory_is_bitwise_and_the_losses_are_those_of_the_segments_one_by_one(
    variant: str,
) -> None:
    model = tiny_model(**VARIANTS[variant], **DROPPING)
    masks = DropoutStream(seed=1, step=3, lanes=range(LANES))
    _, memory = read(model, 0, BEFORE, None, masks)
    expected_BT, expected = one_by_one(model, memory, masks)
    nll_BT, found = read(model, BEFORE, BEFORE + TOTAL, memory, masks, SEGMENTS)
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
def test_checkpointing_changes_no_bit_of_the_gradients_nor_kernels_more_than_rounding(
    variant: str,
) -> None:
    like = tiny_model(**VARIANTS[variant], **DROPPING)
    masks = DropoutStream(seed=1, step=3, lanes=range(LANES))

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
