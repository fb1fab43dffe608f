"""Relative effective context length: the rule on given losses, and losses after c tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foundation.errors import ConfigError
from pretrain.config.model import ModelConfig
from pretrain.evaluation.context_length import (
    ContextGrid,
    Losses,
    SplitPositions,
    relative_effective_context_lengths,
)
from pretrain.model.transformer_xl import TransformerXL

CONTEXTS = ContextGrid(step=10, longest=100)


def falling_until(end: int, start: float = 5.0) -> Losses:
    """Each further 10 tokens lower the loss by .05 up to `end` tokens, then no more."""
    return lambda length: torch.full((8,), start - 0.005 * min(length, end), dtype=torch.float64)


def test_the_length_is_where_gains_end() -> None:
    ((found,),) = relative_effective_context_lengths([falling_until(60)], CONTEXTS, [1.0])
    assert found.length == 60
    assert not found.reached_longest
    assert found.gains[:5] == pytest.approx([1 - math.exp(-0.05)] * 5)
    assert found.gains[5] == 0.0


def test_a_model_that_still_gains_at_the_end_says_so() -> None:
    ((found,),) = relative_effective_context_lengths([falling_until(1000)], CONTEXTS, [1.0])
    assert (found.length, found.reached_longest, len(found.gains)) == (100, True, 9)


def test_gains_count_from_the_best_model_of_the_group() -> None:
    """A model that is always worse than another one gains nothing, however much it improves."""
    poor, good = falling_until(100, start=6.0), falling_until(50)
    (of_poor,), (of_good,) = relative_effective_context_lengths([poor, good], CONTEXTS, [1.0])
    assert (of_poor.length, of_good.length) == (10, 50)
    ((alone,),) = relative_effective_context_lengths([poor], CONTEXTS, [1.0])
    assert alone.length == 100


def test_shares_take_the_hardest_positions() -> None:
    """Only the hardest of ten positions keeps gaining."""

    def losses(length: int) -> Tensor:
        losses_P = torch.ones(10, dtype=torch.float64)
        losses_P[3] = 9.0 - 0.01 * length
        return losses_P

    ((hardest, all_positions),) = relative_effective_context_lengths([losses], CONTEXTS, [0.1, 1.0])
    assert hardest.length == 100
    assert all_positions.length == 10  # a tenth of .1 nats is below one percent


@pytest.mark.parametrize("positions", ["relative", "rope"])
@pytest.mark.parametrize("length", [1, 7, 12])
def test_a_position_sees_exactly_that_many_tokens(corpus, positions, length) -> None:
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "init_std": 0.3}
    config = ModelConfig(vocab_size=corpus.manifest.vocab_size, positions=positions, **sizes)
    module = TransformerXL(config).double().eval()
    positions = SplitPositions(corpus, 70, longest=30)
    found_P = positions.losses(module, length, memory_length=30, segment_length=5)
    for index in (0, 1, 69):
        offset = int(positions.offsets_P[index])
        window_W = positions.tokens_T[offset - length : offset + 1]
        with torch.no_grad():
            nll_BL, _ = module(window_W[None, :-1], window_W[None, 1:], memory_length=30)
        assert float(found_P[index]) == pytest.approx(float(nll_BL[0, -1]), abs=1e-10)
    assert len(found_P) == len(positions) == 70


def test_a_short_split_has_fewer_positions_and_too_short_a_one_is_refused(corpus) -> None:
    assert len(SplitPositions(corpus, 10**9, longest=30)) == corpus.num_tokens - 30
    with pytest.raises(ConfigError):
        SplitPositions(corpus, 5, longest=10**9)
