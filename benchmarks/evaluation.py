"""Evaluation with frozen weights: cached keys and values against cached hidden states, and against a sliding window.

The sliding window is what a model without recurrence does (section 3.1 and table 9 of the paper): for every token it
computes all the tokens before it again, as far as attention reaches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.compare import Comparison
from pretrain.config.run import ModelConfig
from pretrain.model.cached import CachedStream
from pretrain.model.memory import Memory
from pretrain.model.transformer_xl import TransformerXL

SEGMENT = 128
LANES = 4
CACHE_GOAL, OWN_GOAL = 3.0, 1.7
WINDOW_GOAL, OWN_WINDOW_GOAL = 3000.0, 2000.0
MEMORY, ATTENTION_LENGTH = 1600, 3800


def evaluation_comparisons() -> list[Comparison]:
    """Caches at the memory of the paper's WikiText-103 model, the window at the attention length of its enwik8 one."""
    cached = _model(num_layers=4, memory_length=MEMORY)
    layer = _model(num_layers=1, memory_length=ATTENTION_LENGTH - SEGMENT)
    return [
        Comparison(
            name=f"cached evaluation, segment {SEGMENT}, memory {MEMORY}, against the original's",
            goal=CACHE_GOAL,
            baseline=_original(cached),
            candidate=_keys_and_values(cached, LANES),
            rounds=4,
        ),
        Comparison(
            name=f"cached evaluation, segment {SEGMENT}, memory {MEMORY}, against our hidden states",
            goal=OWN_GOAL,
            baseline=_hidden_states(cached, LANES),
            candidate=_keys_and_values(cached, LANES),
            rounds=4,
        ),
        Comparison(
            name=f"cached layer, attention length {ATTENTION_LENGTH}, against the original's sliding window",
            goal=WINDOW_GOAL,
            baseline=_original_window(layer),
            candidate=_keys_and_values(layer, lanes=1),
            rounds=4,
            candidate_work=SEGMENT,
        ),
        Comparison(
            name=f"cached layer, attention length {ATTENTION_LENGTH}, against our own sliding window",
            goal=OWN_WINDOW_GOAL,
            baseline=_sliding_window(layer),
            candidate=_keys_and_values(layer, lanes=1),
            rounds=6,
            candidate_work=SEGMENT,
        ),
    ]


def _model(num_layers: int, memory_length: int) -> TransformerXL:
    return TransformerXL(
        ModelConfig(
            vocab_size=204,
            num_layers=num_layers,
            d_model=512,
            num_heads=8,
            d_inner=2048,
            memory_length=memory_length,
        )
    ).eval()


def _tokens(lanes: int, length: int = SEGMENT) -> Tensor:
    return torch.randint(204, (lanes, length + 1), generator=torch.Generator().manual_seed(length))


def _reference(
    model: TransformerXL,
) -> Callable[[Tensor, Tensor, list[Tensor], int], tuple[Tensor, list[Tensor]]]:
    from tests.helpers.reference_training import ReferenceTransformerXL

    config = model.config
    return ReferenceTransformerXL(
        config.vocab_size,
        config.num_layers,
        config.num_heads,
        config.d_model,
        config.inner_width,
        dropout=0.0,
    ).eval()


def _original(model: TransformerXL) -> Callable[[], None]:
    reference = _reference(model)
    tokens_TB = _tokens(LANES).t().contiguous()
    memory: list[list[Tensor]] = [[]]

    @torch.no_grad()
    def work() -> None:
        _, memory[0] = reference(
            tokens_TB[:-1], tokens_TB[1:], memory[0], model.config.memory_length
        )

    return _with_full_memory(work, model)


def _original_window(model: TransformerXL) -> Callable[[], None]:
    reference = _reference(model)
    tokens_TB = _tokens(1, ATTENTION_LENGTH).t().contiguous()

    @torch.no_grad()
    def work() -> None:
        reference(tokens_TB[:-1], tokens_TB[1:], [], 1)

    return work


def _hidden_states(model: TransformerXL, lanes: int) -> Callable[[], None]:
    tokens_BT = _tokens(lanes)
    memory: list[Memory | None] = [None]

    @torch.no_grad()
    def work() -> None:
        _, memory[0] = model(tokens_BT[:, :-1], tokens_BT[:, 1:], memory[0])

    return _with_full_memory(work, model)


def _keys_and_values(model: TransformerXL, lanes: int) -> Callable[[], None]:
    tokens_BT = _tokens(lanes)
    cached = CachedStream(model, model.config.memory_length, SEGMENT)
    return _with_full_memory(lambda: cached.nll_BL(tokens_BT[:, :-1], tokens_BT[:, 1:]), model)


def _sliding_window(model: TransformerXL) -> Callable[[], None]:
    tokens_BT = _tokens(1, ATTENTION_LENGTH)

    @torch.no_grad()
    def work() -> None:
        hidden_BLD, _ = model.hidden_states(tokens_BT[:, :-1], memory_length=0)
        model.head(hidden_BLD[:, -1:], tokens_BT[:, -1:])

    return work


def _with_full_memory(work: Callable[[], object], model: TransformerXL) -> Callable[[], None]:
    """`work`, which at its first call is repeated until the memory is full."""
    missing = [-(-model.config.memory_length // SEGMENT)]

    def full() -> None:
        while missing[0] > 0:
            work()
            missing[0] -= 1
        work()

    return full
