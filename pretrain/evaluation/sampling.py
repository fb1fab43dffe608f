"""Sampling from a trained model: the prompt is read in segments, then the text token by token.

Each token costs one forward pass of length 1 against cached keys and values, regardless of how long
the text already is. B samples, V vocabulary; other letters of shapes as in `pretrain.model`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.tokenizer import TRAITS, Tokenizer
from foundation.errors import ConfigError
from pretrain.model.adopted import LanguageModel
from pretrain.model.cached import last_logits_BTV, new_stream
from pretrain.model.memory import document_starts


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the model's distribution."""

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # only the smallest set of tokens with at least this probability
    repetition_penalty: float = 1.0  # divides the probability of each token in the text so far

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be 0 or more, and finite")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 1.0 <= self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} must be 1 or more, and finite"
            )


@torch.no_grad()
def generate(
    module: LanguageModel,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    num_tokens: int,
    end_id: int,
    num_samples: int = 1,
    seed: int = 0,
    memory_length: int | None = None,
    segment_length: int = 128,
    end_repeats: bool = False,
) -> Iterator[Tensor]:
    """Yield the next token of every sample, [B], `num_tokens` times; a seed fixes the tokens.

    The prompt has at least one token. `end_id` ends a document, and starts the text. It never
    follows itself, because no document is empty, unless `end_repeats`: where it also stands for a
    line end, an empty line repeats it.
    """
    assert len(prompt) > 0
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    module.eval()
    tokens_BL = torch.tensor([prompt] * num_samples, device=device)
    starts_BL = document_starts(tokens_BL, end_id)
    length = module.config.longest_memory if memory_length is None else memory_length
    stream = new_stream(module, length, segment_length, len(prompt) + num_tokens)
    seen_BV = seen_tokens(tokens_BL.cpu(), module.config.vocab_size)
    last_B = tokens_BL[:, -1].cpu()
    logits_BLV = last_logits_BTV(stream.logits_BLV, tokens_BL, starts_BL, segment_length, 1)
    for remaining in reversed(range(num_tokens)):
        seen_BV[:, end_id] = False  # no penalty: every document has it
        logits_BV = penalized(logits_BLV[:, -1].float().cpu(), seen_BV, sampling.repetition_penalty)
        if not end_repeats:
            logits_BV[last_B == end_id, end_id] = -math.inf
        yield (tokens_B := choose(logits_BV, sampling, generator))
        seen_BV.scatter_(1, tokens_B[:, None], True)
        last_B = tokens_B
        if remaining:
            starts_BL, tokens_BL = tokens_BL[:, -1:] == end_id, tokens_B[:, None].to(device)
            logits_BLV = stream.logits_BLV(tokens_BL, starts_BL)


def seen_tokens(tokens_BL: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens of the vocabulary occur in each row, [B, V]."""
    return torch.zeros(len(tokens_BL), vocab_size, dtype=torch.bool).scatter_(1, tokens_BL, True)


def penalized(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Return unnormalized log-probabilities; every token seen is `penalty` times less likely."""
    return logits_BV - math.log(penalty) * seen_BV


def choose(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return one token per row, [B], on the CPU."""
    logits_BV = logits_BV.float().cpu()
    if sampling.temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    # Relative to the most likely token and in float64, so that no temperature overflows.
    below_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)).double() / sampling.temperature
    sorted_BV, tokens_BV = below_BV.sort(dim=-1, descending=True, stable=True)
    probabilities_BV = sorted_BV.softmax(dim=-1)
    if sampling.top_k:
        probabilities_BV[:, sampling.top_k :] = 0.0
    # Keep a token while those before it have less than top_p: the most likely one always stays.
    before_BV = probabilities_BV.cumsum(dim=-1) - probabilities_BV
    total_B1 = probabilities_BV.sum(dim=-1, keepdim=True)
    probabilities_BV[before_BV >= sampling.top_p * total_B1] = 0.0
    rank_B1 = torch.multinomial(probabilities_BV, 1, generator=generator)
    return tokens_BV.gather(1, rank_B1).squeeze(1)


class TextStream:
    """Decodes tokens as they arrive; a character waits until all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._joins = TRAITS[tokenizer.kind].joins
        self._pending: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """Return the text that `token` adds; the end of a document becomes a separate line."""
        if token == self._tokenizer.end_id and not self._tokenizer.end_text:
            rest = self.rest()
            return f"{rest}\n----\n"
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        if new.endswith("\n") and self._joins:  # decoding can restart here
            self._pending, self._shown = [], ""
        return new

    def rest(self) -> str:
        """Return the text that is still waiting."""
        text = self._tokenizer.decode(self._pending)[len(self._shown) :]
        self._pending, self._shown = [], ""
        return text


def prompt_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the prompt as the start of a document, after the end of another, as in training."""
    return [tokenizer.end_id, *map(int, tokenizer.encode(text))]
