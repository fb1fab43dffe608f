"""Evaluation with frozen weights: cached keys and values, hidden states and a sliding window.

The sliding window is what a model without recurrence needs (section 3.1 and table 9 of the paper):
for every token it computes all earlier tokens again, as far as attention reaches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import Comparison, timed
from pretrain.config.run import ModelConfig
from pretrain.model.cached import CachedStream, HiddenStateStream
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.reference_training import ReferenceTransformerXL

SEGMENT = 128
LANES = 4
VOCABULARY = 204
CACHE_GOAL, OWN_GOAL = 3.0, 1.7
WINDOW_GOAL, OWN_WINDOW_GOAL = 3000.0, 2000.0
MEMORY, ATTENTION_LENGTH = 1600, 3800  # of the paper's WikiText-103 and enwik8 evaluations


def evaluation_comparisons() -> list[Comparison]:
    """Return the comparisons of the cache and of the sliding window."""
    cached = _model(num_layers=4, memory_length=MEMORY)
    layer = _model(num_layers=1, memory_length=ATTENTION_LENGTH - SEGMENT)
    cache_name = f"cached evaluation, segment {SEGMENT}, memory {MEMORY}, against"
    window_name = f"cached layer, attention length {ATTENTION_LENGTH}, against"
    return [
        Comparison(
            name=f"{cache_name} the original's",
            goal=CACHE_GOAL,
            baseline=_seconds(_original(cached), cached),
            candidate=_seconds(_keys_and_values(cached, LANES), cached),
            rounds=4,
        ),
        Comparison(
            name=f"{cache_name} our hidden states",
            goal=OWN_GOAL,
            baseline=_seconds(_hidden_states(cached, LANES), cached),
            candidate=_seconds(_keys_and_values(cached, LANES), cached),
            rounds=4,
        ),
        Comparison(
            name=f"{window_name} the original's sliding window",
            goal=WINDOW_GOAL,
            baseline=timed(_original_window(layer)),
            candidate=_seconds(_keys_and_values(layer, lanes=1), layer),
            rounds=4,
            candidate_work=SEGMENT,
        ),
        Comparison(
            name=f"{window_name} our own sliding window",
            goal=OWN_WINDOW_GOAL,
            baseline=timed(_sliding_window(layer)),
            candidate=_seconds(_keys_and_values(layer, lanes=1), layer),
            rounds=6,
            candidate_work=SEGMENT,
        ),
    ]


def _model(num_layers: int, memory_length: int) -> TransformerXL:
    config = ModelConfig(
        vocab_size=VOCABULARY,
        num_layers=num_layers,
        d_model=512,
        num_heads=8,
        d_inner=2048,
        memory_length=memory_length,
    )
    return TransformerXL(config).eval()


def _seconds(work: Callable[[], object], model: TransformerXL) -> Callable[[], float]:
    """Return a function that times `work`; its first call repeats the work until memory is full."""
    missing = -(-model.config.longest_memory // SEGMENT)
    seconds = timed(work)

    def with_full_memory() -> float:
        nonlocal missing
        while missing > 0:
            work()
            missing -= 1
        return seconds()

    return with_full_memory


def _tokens(lanes: int, length: int = SEGMENT) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(VOCABULARY, (lanes, length + 1), generator=generator)


def _reference(model: TransformerXL) -> ReferenceTransformerXL:
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
    reference, length = _reference(model), model.config.longest_memory
    tokens_TB = _tokens(LANES).t().contiguous()
    memory: list[Tensor] = []

    @torch.no_grad()
    def work() -> None:
        nonlocal memory
        _, memory = reference(tokens_TB[:-1], tokens_TB[1:], memory, length)

    return work


def _original_window(model: TransformerXL) -> Callable[[], None]:
    reference = _reference(model)
    tokens_TB = _tokens(1, ATTENTION_LENGTH).t().contiguous()

    @torch.no_grad()
    def work() -> None:
        reference(tokens_TB[:-1], tokens_TB[1:], [], 1)

    return work


def _hidden_states(model: TransformerXL, lanes: int) -> Callable[[], object]:
    tokens_BT = _tokens(lanes)
    stream = HiddenStateStream(model, model.config.longest_memory, SEGMENT)
    return lambda: stream.nll_BL(tokens_BT[:, :-1], tokens_BT[:, 1:])


def _keys_and_values(model: TransformerXL, lanes: int) -> Callable[[], object]:
    tokens_BT = _tokens(lanes)
    stream = CachedStream(model, model.config.longest_memory, SEGMENT)
    return lambda: stream.nll_BL(tokens_BT[:, :-1], tokens_BT[:, 1:])


def _sliding_window(model: TransformerXL) -> Callable[[], None]:
    tokens_BT = _tokens(1, ATTENTION_LENGTH)

    @torch.no_grad()
    def work() -> None:
        hidden_BLD, _, _ = model.hidden_states(tokens_BT[:, :-1], memory_length=0)
        model.head(hidden_BLD[:, -1:], tokens_BT[:, -1:])

    return work
