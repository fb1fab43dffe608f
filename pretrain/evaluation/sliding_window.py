"""Evaluation with memory against a window that slides by one token (section 3.2 and table 9).

Without recurrence, a model that uses A tokens of context for every prediction computes all of them
again for each one. With memory every token is computed once. Both sides are measured in predicted
tokens per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foundation.errors import ConfigError
from pretrain.config.model import ModelConfig
from pretrain.costs.flops import flops_of
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL

# Table 9 has these attention lengths for a model trained with a memory of 768.
PAPER_TRAINING_MEMORY = 768
PAPER_ATTENTION_LENGTHS = (800, 1800, 2800, 3800)
MINIMUM_SECONDS = 1.0  # of measuring each side


@dataclass(frozen=True)
class ThroughputComparison:
    """Predicted tokens per second with one attention length and one stream on each side."""

    attention_length: int  # keys that the segment's last token sees
    cached: float
    sliding_window: float
    by_flops: float  # the ratio expected from the FLOPs of matrix products

    @property
    def ratio(self) -> float:
        return self.cached / self.sliding_window


def attention_lengths(model: ModelConfig, segment_length: int) -> list[int]:
    """Return the paper's attention lengths, scaled to the model's training memory."""
    if not model.longest_memory:
        raise ConfigError("a sliding window is compared with memory, but this model has none")
    lengths = (n * model.longest_memory // PAPER_TRAINING_MEMORY for n in PAPER_ATTENTION_LENGTHS)
    return [max(length, segment_length + 1) for length in lengths]


@torch.no_grad()
def compare(
    module: TransformerXL,
    attention_length: int,
    segment_length: int,
    seconds: float = MINIMUM_SECONDS,
) -> ThroughputComparison:
    """Measure both ways on random tokens; ConfigError if no room is left for memory."""
    memory_length = attention_length - segment_length
    if memory_length < 1:
        raise ConfigError(
            f"attention length {attention_length} must exceed the segment length "
            f"{segment_length}; use a longer one or a shorter segment"
        )
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(attention_length)
    shape = (1, attention_length + 1)
    tokens_BT = torch.randint(module.config.vocab_size, shape, generator=generator).to(device)
    inputs_BL, targets_BL = tokens_BT[:, -segment_length - 1 : -1], tokens_BT[:, -segment_length:]
    stream = new_stream(module, memory_length, segment_length)
    for _ in range(-(-memory_length // segment_length)):
        stream.nll_BL(inputs_BL, targets_BL)

    def segment() -> Tensor:
        return stream.nll_BL(inputs_BL, targets_BL)

    def window() -> Tensor:
        hidden_BLD, _, _ = module.hidden_states(tokens_BT[:, :-1], memory_length=0)
        return module.head(hidden_BLD[:, -1:], tokens_BT[:, -1:])

    return ThroughputComparison(
        attention_length=attention_length,
        cached=segment_length * _calls_per_second(segment, seconds),
        sliding_window=_calls_per_second(window, seconds),
        by_flops=_ratio_of_flops(module.config, attention_length, segment_length),
    )


def _calls_per_second(work: Callable[[], Tensor], seconds: float) -> float:
    float(work().sum())  # reading the value waits for the device
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        float(work().sum())
        calls += 1
    return calls / (time.perf_counter() - start)


def _ratio_of_flops(model: ModelConfig, attention_length: int, segment_length: int) -> float:
    """Return FLOPs per token of the window over those of the cache, which projects rows once."""
    alone = replace(model, memory_length=0, same_length=False, compressed_length=0)
    remembering = replace(model, same_length=False, compressed_length=0).with_memory(
        attention_length - segment_length
    )
    segment = flops_of(alone, segment_length, 1)
    cached = segment.forward - segment.positions - segment.attention
    cached += flops_of(remembering, segment_length, 1).attention
    window = flops_of(alone, attention_length, 1)
    return (attention_length * (window.forward - window.head) + window.head) / cached


def comparison_rows(results: Sequence[ThroughputComparison]) -> list[tuple[str, ...]]:
    """Return the rows of a table, heads first."""
    heads = ("attention length", "tokens/s with memory", "with a sliding window", "ratio")
    rows = [
        (
            f"{each.attention_length:,}",
            f"{each.cached:,.0f}",
            f"{each.sliding_window:,.1f}",
            f"{each.ratio:,.0f}x",
            f"{each.by_flops:,.0f}x",
        )
        for each in results
    ]
    return [(*heads, "ratio by FLOPs"), *rows]
