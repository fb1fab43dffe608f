"""Read and write tokens of segments (`model.memory_tokens`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foundation.errors import ConfigError
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.run import RunConfig
from pretrain.model.cached import new_stream
from pretrain.model.lane_state import LaneState
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import TINY, random_starts, random_tokens, tiny_model

TOKENS, LENGTH = 3, 5
ALONE: dict[str, Any] = {"memory_tokens": TOKENS, "memory_length": 0}


def embedded_between(ends: Callable[[], Tensor]) -> Callable[..., Tensor]:
    """A hook of an embedding: what it returns, between the ends."""

    def hook(_module: torch.nn.Module, _inputs: Any, hidden_BLD: Tensor) -> Tensor:
        return torch.cat([ends(), hidden_BLD, ends()], dim=1)

    return hook


def read_between_ends(plain: TransformerXL, tokens_BL: Tensor) -> Any:
    """What the plain model returns for as many tokens as it gets vectors: those of the ends do
    not matter."""
    ends_BX = tokens_BL[:, :TOKENS]
    padded_BX = torch.cat([ends_BX, tokens_BL, ends_BX], dim=1)
    handle = plain.embedding.register_forward_pre_hook(
        lambda _module, inputs: (inputs[0][:, TOKENS:-TOKENS],)
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
        ends_BXD = expected_BXD[:, -TOKENS:]
        if model.memory_tokens.norm is not None:
            ends_BXD = model.memory_tokens.norm(ends_BXD)
        torch.testing.assert_close(hidden_BLD, expected_BXD[:, TOKENS:-TOKENS])
        written_BXD = LaneState(model.config).named(memory)["memory_tokens"]
        torch.testing.assert_close(written_BXD, ends_BXD.detach())


def test_the_memory_of_hidden_states_holds_the_segments_own_tokens() -> None:
    model = tiny_model(memory_tokens=TOKENS, memory_length=7)
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
    model = tiny_model(memory_tokens=TOKENS, memory_length=4).eval()
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
    with pytest.raises(ConfigError, match=r"memory_tokens=4 needs optim\.gradient_segments of 2"):
        RunConfig(model=model)
    assert RunConfig(model=model, optim=OptimConfig(gradient_segments=2)).model == model
    with pytest.raises(ConfigError, match="out of sight of most queries"):
        ModelConfig(memory_tokens=4, same_length=True)
