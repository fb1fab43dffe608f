"""Reading and writing text beside the class of transformers with its cache, in the hybrid's shape.

Both read as many keys per token: our memory is as long as the text. Seconds are CPU seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Comparison, timed
from benchmarks.model.yardsticks import HYBRID, ROPE, SIZES, Qwen3Next
from pretrain.config.model import ModelConfig
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL

SEGMENT, PROMPT, NEW_TOKENS, ROUNDS, GOAL = 256, 1024, 32, 3, 3.0
# From tokens [B, L] to logits [B, V] after the last one; what it has read stays with it.
Reader = Callable[[Tensor], Tensor]


def generation_comparisons() -> list[Comparison]:
    """Return comparisons of new tokens after a prompt, and of the reading of a long text."""
    return [
        *(_comparison(f"{NEW_TOKENS} new tokens after {PROMPT:,}", texts, PROMPT, NEW_TOKENS)
          for texts in (1, 64)),
        *(_comparison(f"reading of {tokens:,} tokens", 1, tokens, 0) for tokens in (1024, 16_384)),
    ]  # fmt: skip


def _comparison(name: str, texts: int, prompt: int, new: int) -> Comparison:
    model = replace(SIZES["8M"], memory_length=prompt + new, layer_kinds=HYBRID)
    tokens_BT = torch.randint(ROPE.vocab_size, (texts, prompt))
    ours, theirs = (
        timed(_continued(cache(build), tokens_BT, new), time.process_time)
        for build in (lambda: _ours(model), lambda: _theirs(model))
    )
    count = "a text" if texts == 1 else f"{texts} texts"
    full_name = f"8M hybrid, {count}: {name}, over transformers' Qwen3-Next"
    return Comparison(full_name, GOAL, theirs, ours, rounds=ROUNDS)


def _continued(
    model: Callable[[], Callable[[], Reader]], tokens_BT: Tensor, new: int
) -> Callable[[], None]:
    def work() -> None:
        with torch.no_grad():
            reader = model()()
            *before, last_BL = tokens_BT.split(SEGMENT, dim=1)
            for part_BL in before:
                reader(part_BL)
            logits_BV = reader(last_BL)
            for _ in range(new):
                logits_BV = reader(logits_BV.argmax(1, keepdim=True))

    return work


def _ours(model: ModelConfig) -> Callable[[], Reader]:
    module = TransformerXL(model).eval()

    def start() -> Reader:
        stream = new_stream(module, model.longest_memory, SEGMENT)
        return lambda tokens_BL: stream.logits_BLV(tokens_BL, num_last=1)[:, -1]

    return start


def _theirs(model: ModelConfig) -> Callable[[], Reader]:
    module = Qwen3Next(model).model.eval()

    def start() -> Reader:
        past: dict[str, Any] = {}

        def read(tokens_BL: Tensor) -> Tensor:
            output = module(input_ids=tokens_BL, use_cache=True, logits_to_keep=1, **past)
            past["past_key_values"] = output.past_key_values
            return output.logits[:, -1]

        return read

    return start
